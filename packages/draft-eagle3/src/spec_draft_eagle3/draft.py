"""Eagle3Draft: the plugin. Imports without torch; the network is in ``model.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from spec_core.errors import ArtifactError, ConfigError
from spec_core.records import FeatureSchema, ShardHints, TensorParallelHints
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.mla_shape import LATENT_SIZES, MLA_ARCHITECTURE, MlaShape
from spec_draft_eagle3.shape import ARCHITECTURE, Eagle3Shape
from spec_kit.drafting import (
    DraftCheckpoint,
    ServedDraft,
    architectures,
    as_served,
    layer_range_problem,
    parallel_mask_token,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core import DraftConfig, Proposer, TargetSpec, TargetTensors, VocabularyOps
    from spec_core.records import Supervision
    from spec_draft_eagle3.model import Eagle3Model
    from spec_kit.chain_drafting import ChainKernels
    from spec_kit.drafting import Json


_MLA_NAMES = {MLA_ARCHITECTURE, "Eagle3DeepseekV3ForCausalLM"}
"""vLLM knows it by both names."""


class Eagle3Draft(ServedDraft[Eagle3Config, Eagle3Shape]):
    """EAGLE-3 (arXiv 2503.01840) with training-time test; see ``spec_core.draft`` for the contract."""

    name: ClassVar[str] = "eagle3"
    api_version: ClassVar[int] = 2
    Config: ClassVar[type[DraftConfig]] = Eagle3Config
    Shape = Eagle3Shape
    architecture: ClassVar[str] = ARCHITECTURE
    speculators_type: ClassVar[str] = "eagle3"
    small_run: ClassVar[Mapping[str, object]] = {"num_steps": 3, "step_decay": 1.0}
    learns_from_guesses: ClassVar[bool] = True
    serving_methods: ClassVar[Mapping[str, str]] = {"vllm": "eagle3", "sglang": "EAGLE3"}

    def __init__(self, config: DraftConfig) -> None:
        """Leave out SGLang where there are several layers: none has been served by it yet.

        Raise ConfigError for sizes of an attention that the draft does not have.
        """
        super().__init__(config)
        _check_sizes(self.options, is_fresh=self.checkpoint is None)
        if (self.options.num_layers or 1) > 1:
            self.serving_methods = {"vllm": "eagle3"}

    @classmethod
    def is_own(cls, fields: Json) -> bool:
        """Return whether the architecture is Eagle3's; EAGLE's own files are known by their draft vocabulary.

        With a mask token the same layers guess all tokens in one pass: that is another algorithm.
        """
        if parallel_mask_token(fields) is not None:
            return False
        named = architectures(fields)
        unnamed = "LlamaForCausalLM" in named and "draft_vocab_size" in fields
        others = _MLA_NAMES | {"Eagle3LlamaForCausalLM"}
        return super().is_own(fields) or not named.isdisjoint(others) or unnamed

    @classmethod
    def shape_type(cls, fields: Json) -> type[Eagle3Shape]:
        """Return the shape with the attention that the architecture names."""
        return Eagle3Shape if architectures(fields).isdisjoint(_MLA_NAMES) else MlaShape

    @classmethod
    def speculators_fields(cls, fields: Json, folder: Path) -> Json:
        """Return the fields under the names that they also have there; layers are those entered, as vLLM's."""
        names = (
            "draft_vocab_size",
            "target_hidden_size",
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            "eagle_aux_hidden_state_layer_ids",
        )
        own = {name: fields[name] for name in names if name in fields}
        fixed = {"architectures": [ARCHITECTURE], "norm_before_residual": True}
        return fixed | own  # where it does not say, vLLM norms before the residual

    @classmethod
    def module_name(cls, stored_name: str) -> str:
        """Return the module's name of a tensor: published drafts call the first layer ``layers.0`` too."""
        name = super().module_name(stored_name)
        return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name

    @classmethod
    def check_checkpoint(cls, checkpoint: DraftCheckpoint[Eagle3Shape]) -> None:
        """Raise ArtifactError for a vocabulary mapping that is none, and for a norm that engines read differently."""
        if "d2t" in checkpoint.stored_names:
            from spec_kit.drafting import read_mapping

            read_mapping(checkpoint)
        _check_copies(checkpoint)

    def fresh_shape(self, target: TargetSpec) -> Eagle3Shape:
        """Return the options, else the target's sizes."""
        options = self.options
        shape = MlaShape if options.attention == "mla" else Eagle3Shape
        return shape.for_target(
            options,
            target,
            num_layers=options.num_layers or 1,
            vocab_size=options.vocab_size or target.vocab_size,
            captured=options.layers,
            fc_norm=bool(options.fc_norm),
            norm_output=bool(options.norm_output),
        )

    def check_target(self, target: TargetSpec) -> None:
        """Raise TargetError for a target that the draft cannot express (D2), ConfigError for too few rows."""
        super().check_target(target)
        if len(target.eos_token_ids) > (size := self.shape(target).vocab_size):
            raise ConfigError(
                f"draft.vocab_size={size} does not hold the target's {len(target.eos_token_ids)} end tokens; raise it"
            )

    def target_problem(self, target: TargetSpec) -> str | None:
        """Return what is wrong with the captured layers, or None."""
        shape, wanted = self.shape(target), self.options.layers
        if shape.captured is None and target.num_layers < 7:
            return (
                f"it has {target.num_layers} layers, at least 7 are needed unless draft.layers names others"
            )
        layers = shape.layer_ids(target.num_layers)
        if wanted not in (None, layers):
            return f"draft.layers={list(wanted)} contradicts draft.init_from, whose layers are {list(layers)}"
        return layer_range_problem(layers, target)

    def required_features(self, target: TargetSpec) -> FeatureSchema:
        """Return the captured layers and the input of the final norm, which the teacher needs."""
        layers = (*self.shape(target).layer_ids(target.num_layers), target.num_layers)
        return FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype=target.dtype)

    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """Return float64 [S]: supervised tokens with at least s + 2 tokens before them in their document.

        Of a sample with guess places, only those at place s + 1 count.
        """
        from spec_kit.chain_drafting import count_labels

        return count_labels(supervision, self.options.num_steps)

    @classmethod
    def kernels(cls) -> type[ChainKernels]:
        """Return the kernels that the draft can use (D10)."""
        from spec_kit.chain_drafting import ChainKernels

        return ChainKernels

    def new_module(self, target: TargetSpec, tensors: TargetTensors, kernels: ChainKernels) -> nn.Module:
        """Return the network with drawn weights."""
        from spec_draft_eagle3.model import Eagle3Model

        return Eagle3Model(self.shape(target), self.options, kernels)

    def initialize(
        self, module: Eagle3Model, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
    ) -> None:
        """Scale what was drawn; take head and final norm from the target."""
        from spec_kit.drafting import start_from_target

        start_from_target(module, target, tensors, token_counts)

    def stored_state(self, checkpoint: DraftCheckpoint[Eagle3Shape]) -> dict[str, Tensor]:
        """Return the module's state dict, the vocabulary mapping included."""
        from spec_kit.drafting import read_mapping

        mapping = read_mapping(checkpoint) if checkpoint.shape.reduced else {}
        return super().stored_state(checkpoint) | mapping

    def exported_tensors(
        self, weights: Mapping[str, Tensor], target: TargetSpec
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained tensors, copies of norms, and the vocabulary mapping if there is one (D8)."""
        from spec_kit.drafting import MAPPING

        shape = self.shape(target)
        yield from super().exported_tensors(weights, target)
        for name, source in shape.norm_copies.items():
            yield name, as_served(weights[source], target).clone()  # else the two would share memory
        for name in MAPPING if shape.reduced else ():
            yield name, as_served(weights[name], target)

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        """Return how tensor-parallel ranks divide the layers, the head, and ``fc`` by its inputs."""
        shape = self.shape(target)
        own = TensorParallelHints(
            columns={"lm_head": shape.vocab_size},
            rows={"fc": shape.num_captured * shape.hidden_size},
            whole_inputs=("fc",),
            leaves=("fc",),
            each_token=("norm",),
            all_tokens_in={"midlayer.input_layernorm": 0, "rank_rows": 0},
            all_tokens_out=("head_input", "whole_rows"),
            kept_ids="t2d" if shape.reduced else "",
        )
        layers = ["midlayer", *(f"layers.{index}" for index in shape.later_layers)]
        hints = sum(map(shape.layer_hints, layers), shape.norm_hints("midlayer.hidden_norm")) + own
        return ShardHints(tensor_parallel=hints, vocabulary=("lm_head",))

    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        """Return a fresh proposer for one sequence (D9)."""
        from spec_draft_eagle3.model import Eagle3Model
        from spec_draft_eagle3.proposer import ChainProposer

        assert isinstance(module, Eagle3Model)
        return ChainProposer(module, ops)


def _check_sizes(options: Eagle3Config, *, is_fresh: bool) -> None:
    """Raise ConfigError for a written size of the other kind of attention; a folder has fixed those of its own."""
    mla = options.attention == "mla"
    others = ("num_kv_heads", "head_dim") if mla and is_fresh else () if mla else tuple(LATENT_SIZES)
    for key in others:
        if (value := getattr(options, key)) is not None:
            raise ConfigError(
                f"draft.{key}={value} is no size of draft.attention={options.attention}; remove it, or set "
                f"draft.attention={'gqa' if mla else 'mla'}"
            )


def _check_copies(checkpoint: DraftCheckpoint[Eagle3Shape]) -> None:
    """Raise ArtifactError where a folder has two norms of one input: engines differ in which they take."""
    import torch

    for name, source in checkpoint.shape.norm_copies.items():
        if name not in checkpoint.stored_names:
            continue
        stored = checkpoint.load(name, source)
        if not torch.equal(stored[name], stored[source]):
            raise ArtifactError(
                f"draft {checkpoint.folder}: {name} differs from {source}: vLLM would norm by the second, SGLang by "
                "the first; store the one that was trained under both names"
            )
