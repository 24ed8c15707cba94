"""MtpDraft is the draft plugin. This module does not import torch; ``model.py`` has the network."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, ClassVar, Self

from spec_core.errors import ConfigError
from spec_core.records import FeatureSchema, ShardHints
from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.expert_shapes import head_kind, shape_of
from spec_draft_mtp.shape import SIZES, MtpShape
from spec_draft_mtp.stored_head import head_shapes, is_whole_target, read_head, stored_parts
from spec_kit.drafting import (
    FROZEN,
    TEACHER,
    TRAINED,
    ServedDraft,
    StepCost,
    as_served,
    num_weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core import DraftConfig, Proposer, TargetSpec, TargetTensors, VocabularyOps
    from spec_core.records import Supervision
    from spec_draft_mtp.model import MtpModel
    from spec_kit.chain_drafting import ChainKernels
    from spec_kit.drafting import DraftCheckpoint, Json, Shapes


class MtpDraft(ServedDraft[MtpConfig, MtpShape]):
    """The multi-token-prediction (MTP) head of Qwen3.5, DeepSeek V3 and GLM models.

    See ``spec_core.draft`` for the contract.
    """

    name: ClassVar[str] = "mtp"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[DraftConfig]] = MtpConfig
    Shape = MtpShape
    architecture: ClassVar[str] = MtpShape.architectures[0]
    depth_option: ClassVar[str] = "num_steps"
    small_run: ClassVar[Mapping[str, object]] = {"num_steps": 3, "step_decay": 1.0}
    learns_from_guesses: ClassVar[bool] = True
    serving_methods: ClassVar[Mapping[str, str]] = {"vllm": "mtp", "llamacpp": "draft-mtp"}

    @classmethod
    def is_own(cls, fields: Json) -> bool:
        """Return whether a config.json describes a model with an MTP head: a target, or an export."""
        return head_kind(fields) is not None

    @classmethod
    def shape_type(cls, fields: Json) -> type[MtpShape]:
        """Return the class of shapes for the head that this config.json describes."""
        return head_kind(fields) or MtpShape

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """Return a draft that starts from the MTP head in ``folder``, or None if the folder has no head.

        SGLang can serve the draft only if the folder is a whole target.
        """
        draft = super().from_folder(folder)
        if draft is not None and is_whole_target(folder):
            draft.serving_methods = {**cls.serving_methods, "sglang": "NEXTN"}
        return draft

    @classmethod
    def write_into_target(cls, target: TargetSpec, folder: Path, output: Path) -> None:
        """Write a copy of the target in which the exported head replaces the target's own head."""
        from spec_draft_mtp.stitch import stitch

        stitch(target.folder, folder, output)

    @classmethod
    def module_name(cls, stored_name: str) -> str:
        """Return the name unchanged: ``stored_shapes`` has the module's names already."""
        return stored_name

    @classmethod
    def stored_shapes(cls, folder: Path) -> Shapes:
        """Return the shapes of the MTP head's tensors in ``folder``, by the names of the module.

        If the folder holds a whole target, its other tensors are ignored.
        """
        return head_shapes(folder)

    def stored_state(self, checkpoint: DraftCheckpoint[MtpShape]) -> dict[str, Tensor]:
        """Return the module's state dict in float32."""
        return {name: tensor.float() for name, tensor in read_head(checkpoint.folder).items()}

    def fresh_shape(self, target: TargetSpec) -> MtpShape:
        """Return the shape of a new head.

        A target whose own head has experts gets a head of the same kind. For any other target it is Qwen3.5's head,
        with sizes from the options and the target.
        """
        if (shape := shape_of(target)) is None:
            return MtpShape.for_target(self.options, target)
        for name in SIZES:
            if (size := getattr(self.options, name)) is not None:
                raise ConfigError(
                    f"draft.{name}={size}: a head with experts has the target's sizes; remove it"
                )
        return shape

    def target_problem(self, target: TargetSpec) -> str | None:
        """Return in which value the head differs from the head that engines build beside the target, or None."""
        return self.shape(target).engine_problem(target)

    def target_tensors(self, target: TargetSpec) -> Sequence[str]:
        """Return the name of the final norm's weight, because the head reads states after this norm (D11)."""
        return (target.norm_name,)

    def required_features(self, target: TargetSpec) -> FeatureSchema:
        """Return the only captured state: the input of the target's final norm."""
        return FeatureSchema(layers=(target.num_layers,), hidden_size=target.hidden_size, dtype=target.dtype)

    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """Return for each of the S unrolled steps the number of labels, float64 [S]."""
        from spec_kit.chain_drafting import count_labels

        return count_labels(supervision, self.options.num_steps)

    def step_cost(self, target: TargetSpec) -> StepCost:
        """Return the cost of a sample (D15).

        For every token, the keys, values and attention of step 0 are computed. A supervised token goes
        through the layer and the target's head once in each step.
        """
        shape = self.shape(target)
        steps = self.options.num_steps
        weights = shape.tensor_shapes()
        keys = num_weights(
            size for name, size in weights.items() if ".self_attn.k" in name or ".self_attn.v" in name
        )
        width = shape.num_heads * shape.cache_shape[1]
        head = target.vocab_size * target.hidden_size
        row = num_weights(weights.values()) + shape.expert_weights
        return StepCost(
            per_token=TRAINED * (prod(weights["mtp.fc.weight"]) + keys),
            per_row=steps * (TRAINED * row + FROZEN * head) + TEACHER * head,
            token_channels=width,
            row_channels=(steps - 1) * width,
        )

    def saved_values(self, target: TargetSpec) -> Callable[[int, int], int]:
        """Return a function that computes how many values a forward pass saves for the backward pass.

        The result is a lower bound. It counts only the unrolled steps of a sample's supervised tokens.
        """
        shape = self.shape(target)
        options = self.options
        heads, key_width = shape.cache_shape
        cached = heads * (key_width + shape.value_width)
        inner = (2 * shape.hidden_size + shape.inner_values) * (not options.checkpoint_activations)
        row = options.num_steps * (shape.hidden_size + cached + inner)
        return lambda _, num_supervised: row * num_supervised

    @classmethod
    def kernels(cls) -> type[ChainKernels]:
        """Return the kernels that the draft can use (D10)."""
        from spec_kit.chain_drafting import ChainKernels

        return ChainKernels

    def new_module(self, target: TargetSpec, tensors: TargetTensors, kernels: ChainKernels) -> nn.Module:
        """Return the network with random weights."""
        from spec_draft_mtp.model import MtpModel, TargetNorm

        norm = TargetNorm(
            tensors.others[target.norm_name], float(target.norm == "rms_plus_one"), target.norm_eps
        )
        return MtpModel(self.shape(target), self.options, norm, kernels)

    def initialize(
        self, module: MtpModel, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
    ) -> None:
        """Scale the random weights, and copy the head's last norm from the target."""
        from spec_draft_mtp.model import scale_initial_weights

        scale_initial_weights(module, tensors.norm_H)

    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each weight, as the target names them; each expert is stored by itself (D8).

        The constants of a router keep float32, as in published targets.
        """
        shape = self.shape(target)
        own = {name: weights[name] for name in (*shape.tensor_shapes(), *shape.mapping_shapes()[0])}
        for name, place in stored_parts(own, target.num_layers if shape.stored_as_layer else None):
            tensor = place.view(own[place.name])
            yield name, tensor.detach().float() if place.is_constant else as_served(tensor, target)

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        """Return how tensor-parallel ranks divide the layer; context-parallel ranks divide the tokens' rows."""
        hints = self.shape(target).parallel_hints()
        undivided = "the draft has a mixture of experts" if hints is None else ""
        return ShardHints(tensor_parallel=hints, undivided=undivided, context_parallel=True)

    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        """Return a new proposer for one sequence (D9)."""
        from spec_draft_mtp.model import MtpModel
        from spec_draft_mtp.proposer import MtpProposer

        assert isinstance(module, MtpModel)
        return MtpProposer(module, ops)
