"""PEagleDraft is the draft plugin. This module does not import torch; ``model.py`` has the network."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, ClassVar

from spec_core.records import ShardHints
from spec_draft_peagle.config import PEagleConfig
from spec_draft_peagle.shape import ARCHITECTURE, MASK_TOKEN, PEagleShape
from spec_kit.block_drafting import choose_mask_token
from spec_kit.chain_drafting import ChainDraft
from spec_kit.drafting import (
    TEACHER,
    TRAINED,
    StepCost,
    architectures,
    num_weights,
    parallel_mask_token,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from spec_core import DraftConfig, Proposer, TargetSpec, TargetTensors, VocabularyOps
    from spec_core.records import Supervision
    from spec_draft_peagle.kernels import PEagleKernels
    from spec_kit.drafting import Json

_NAMES = frozenset({"PEagleDraftModel", "PeagleLlamaForCausalLM"})
"""Architectures that only P-EAGLE drafts with Llama layers have."""
_EAGLE3_NAMES = frozenset({ARCHITECTURE, "Eagle3LlamaForCausalLM"})
"""Architectures that Eagle3 drafts also have. A draft of such an architecture is P-EAGLE if it has a mask
token."""


class PEagleDraft(ChainDraft[PEagleConfig, PEagleShape]):
    """P-EAGLE (arXiv 2602.01469): an Eagle3 that guesses all tokens in one pass.

    See ``spec_core.draft`` for the contract.
    """

    name: ClassVar[str] = "peagle"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[DraftConfig]] = PEagleConfig
    Shape = PEagleShape
    architecture: ClassVar[str] = ARCHITECTURE
    speculators_type: ClassVar[str] = "peagle"
    speculators_architecture: ClassVar[str] = "PEagleDraftModel"
    depth_option: ClassVar[str] = "num_guesses"
    small_run: ClassVar[Mapping[str, object]] = {"num_guesses": 3, "num_layers": 2, "retention": 1.0}
    learns_from_guesses: ClassVar[bool] = True
    serving_methods: ClassVar[Mapping[str, str]] = {"vllm": "eagle3"}

    @classmethod
    def is_own(cls, fields: Json) -> bool:
        """Return whether the architecture is P-EAGLE's, or Eagle3's with a mask token."""
        is_parallel = parallel_mask_token(fields) is not None
        return not architectures(fields).isdisjoint(_NAMES | _EAGLE3_NAMES if is_parallel else _NAMES)

    @classmethod
    def speculators_fields(cls, fields: Json, folder: Path) -> Json:
        """Return the fields of a ``speculators`` config.json, under the names that engines read."""
        own = {"architectures": ["PeagleLlamaForCausalLM"], MASK_TOKEN: fields.get("mask_token_id")}
        return super().speculators_fields(fields, folder) | own

    @classmethod
    def to_speculators(cls, served: Json) -> Json:
        """Return the fields that ``speculators_fields`` reads."""
        return {**super().to_speculators(served), "mask_token_id": served[MASK_TOKEN]}

    def fresh_shape(self, target: TargetSpec) -> PEagleShape:
        """Return the shape of a new draft, from the options and the target's sizes."""
        options = self.options
        mask_token_id = options.mask_token_id
        return PEagleShape.for_target(
            options,
            target,
            num_layers=options.num_layers or 4,
            vocab_size=options.vocab_size or target.vocab_size,
            mask_token_id=choose_mask_token(target) if mask_token_id is None else mask_token_id,
            captured=options.layers,
            norm_before_residual=bool(options.norm_before_residual),
            norm_before_fc=bool(options.norm_before_fc),
        )

    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """Return float64 [2 K], the numbers of guesses that count in the loss, for chains of K guesses.

        Element k of the first K numbers counts the guesses with index k in their chain that the random drop
        leaves. Element k of the last K numbers counts the same guesses before the drop.
        """
        import torch

        from spec_draft_peagle.chains import ChainRule

        options = self.options
        rule = ChainRule(
            num_guesses=options.num_guesses,
            retention=options.retention,
            least_retention=options.least_retention,
        )
        place_K = torch.arange(options.num_guesses)
        counts = torch.zeros(2, options.num_guesses, dtype=torch.float64)
        for sample in supervision:
            counts += torch.stack([(length_R[:, None] > place_K).sum(0) for length_R in rule.draw(sample)])
        return counts.flatten()

    def step_cost(self, target: TargetSpec) -> StepCost:
        """Return the cost of a sample (D15).

        Every token goes through all layers but the last. A supervised token also goes through the last layer.
        The mask tokens of its chain, as many as the random drop leaves on average, go through all layers.
        """
        shape = self.shape(target)
        weights = shape.tensor_shapes()
        layers = num_weights(size for name, size in weights.items() if name.startswith("layers."))
        last = layers // shape.num_layers
        masks = self._masks()
        width = shape.num_heads * shape.head_dim
        head = target.vocab_size * target.hidden_size
        trained = masks * layers + last + (1 + masks) * prod(weights["lm_head.weight"])
        return StepCost(
            per_token=TRAINED * (prod(weights["fc.weight"]) + layers - last),
            per_row=round(TRAINED * trained) + TEACHER * head,
            token_channels=(shape.num_layers - 1) * width,
            row_channels=round((masks * shape.num_layers + 1) * width),
        )

    def saved_values(self, target: TargetSpec) -> Callable[[int, int], int]:
        """Return a function that computes how many values a forward pass saves for the backward pass.

        The result is a lower bound. If ``segment_tokens`` is None, it counts every layer's activations for
        the sample's tokens and mask tokens, and in the last layer only for tokens that guess (only the layers'
        inputs with ``checkpoint_activations``). Otherwise it counts the keys and values of the sample's tokens,
        and the inputs of the head.
        """
        shape = self.shape(target)
        masks = self._masks()
        keys = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        row = shape.hidden_size + shape.inner_values * (not self.options.checkpoint_activations)
        earlier = shape.num_layers - 1
        if self.options.segment_tokens is None:
            return lambda num_tokens, num_supervised: round(
                row * (earlier * (num_tokens + masks * num_supervised) + (1 + masks) * num_supervised)
            )
        guess = (1 + masks) * shape.hidden_size
        return lambda num_tokens, num_supervised: round(keys * num_tokens + guess * num_supervised)

    def _masks(self) -> float:
        """Return about how many mask tokens the random drop leaves in a chain, on average."""
        options = self.options
        kept = (options.retention**guess for guess in range(1, options.num_guesses))
        return sum(max(share, options.least_retention) for share in kept)

    @classmethod
    def kernels(cls) -> type[PEagleKernels]:
        """Return the kernels that the draft can use (D10)."""
        from spec_draft_peagle.kernels import PEagleKernels

        return PEagleKernels

    def new_module(self, target: TargetSpec, tensors: TargetTensors, kernels: PEagleKernels) -> nn.Module:
        """Return the network with random weights."""
        from spec_draft_peagle.model import PEagleModel

        return PEagleModel(self.shape(target), self.options, kernels)

    @property
    def default_draft_tokens(self) -> int:
        """Number of guesses that the draft was trained for, if it is known; all cost one pass (D9)."""
        return self.trained_depth or super().default_draft_tokens

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        """Return how tensor-parallel ranks divide the layers, the head, and ``fc`` along its inputs."""
        return ShardHints(tensor_parallel=self.shape(target).parallel_hints(), vocabulary=("lm_head",))

    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        """Return a new proposer for one sequence (D9)."""
        from spec_draft_peagle.model import PEagleModel
        from spec_draft_peagle.proposer import PEagleProposer

        assert isinstance(module, PEagleModel)
        return PEagleProposer(module, ops)
