"""MedusaDraft: heads on the target's last state, each of which guesses one of the next tokens.

The method is that of arXiv 2401.10774. Nothing here needs torch to be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from spec_core import DraftConfig
from spec_core.records import FeatureSchema, ShardHints
from spec_kit.drafting import DraftShape, ServedDraft, Size, head_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from spec_core import Proposer, TargetSpec, TargetTensors, VocabularyOps
    from spec_core.records import Supervision
    from spec_draft_medusa.kernels import MedusaKernels
    from spec_draft_medusa.model import MedusaModel
    from spec_kit.drafting import Json, Shapes


class MedusaConfig(DraftConfig):
    """Section ``draft`` of a run that names this draft: ``draft.num_heads=4`` works on the command line."""

    num_heads: int | None = Field(None, ge=1)
    """Heads: how many tokens are guessed at once. None: what the folder ``init_from`` has, else 3."""


class MedusaShape(DraftShape):
    """Sizes of one draft, and its form in the config.json that vLLM reads."""

    num_heads: Size

    def tensor_shapes(self) -> Shapes:
        h, shapes = self.hidden_size, dict[str, tuple[int, ...]]()
        for head in range(self.num_heads):
            shapes |= {
                f"blocks.{head}.layers.0.weight": (h, h),
                f"lm_heads.{head}.weight": (self.target_vocab_size, h),
            }
        return shapes

    def fixed_fields(self) -> Json:
        return {
            "num_hidden_layers": 1,
            "medusa_fc_bias": False,
            "original_lm_head": False,
            "logit_scale": 1.0,
        }

    def to_json(self, target: TargetSpec) -> Json:
        sizes = {"hidden_size": self.hidden_size, "num_heads": self.num_heads}
        return head_fields("MedusaModel", "medusa", target) | sizes | self.fixed_fields()


class MedusaDraft(ServedDraft[MedusaConfig, MedusaShape]):
    name: ClassVar[str] = "medusa"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[DraftConfig]] = MedusaConfig
    Shape: ClassVar[type[DraftShape]] = MedusaShape
    architecture: ClassVar[str] = "MedusaModel"
    serving_methods: ClassVar[Mapping[str, str]] = {"vllm": "medusa"}

    @classmethod
    def kernels(cls) -> type[MedusaKernels]:
        from spec_draft_medusa.kernels import MedusaKernels

        return MedusaKernels

    def fresh_shape(self, target: TargetSpec) -> MedusaShape:
        return MedusaShape.for_target(self.options, target, num_heads=self.num_heads)

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        heads = range(self.shape(target).num_heads)
        return ShardHints(vocabulary=tuple(f"lm_heads.{head}" for head in heads))

    def required_features(self, target: TargetSpec) -> FeatureSchema:
        """Return the one layer that is captured: the input of the target's final norm."""
        return FeatureSchema(layers=(target.num_layers,), hidden_size=target.hidden_size, dtype=target.dtype)

    def denominators(self, supervision: Sequence[Supervision]) -> Tensor:
        """Return float64 [K]: for head k, the supervised tokens with at least k + 2 tokens before them."""
        import torch

        counts = torch.zeros(self.num_heads, dtype=torch.float64)
        for sample in supervision:
            counts += torch.stack([sample.loss_mask[k + 2 :].sum() for k in range(self.num_heads)])
        return counts

    def new_module(self, target: TargetSpec, tensors: TargetTensors, kernels: MedusaKernels) -> nn.Module:
        from spec_draft_medusa.model import MedusaModel

        return MedusaModel(self.shape(target), tensors.norm_H, target.norm_eps, kernels)

    def initialize(
        self, module: MedusaModel, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
    ) -> None:
        """Start every head as the target's own, behind a block that changes nothing."""
        for block, head in zip(module.blocks, module.lm_heads, strict=True):
            block.layers[0].weight.data.zero_()
            head.weight.data.copy_(tensors.head_VH.float() * target.logit_scale)

    def proposer(self, module: nn.Module, ops: VocabularyOps) -> Proposer:
        from spec_draft_medusa.model import HeadsProposer

        return HeadsProposer(module)

    @property
    def num_heads(self) -> int:
        return self.options.num_heads or 3

    @property
    def max_draft_tokens(self) -> int | None:
        return self.num_heads
