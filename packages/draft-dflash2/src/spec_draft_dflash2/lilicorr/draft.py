"""LiLiCorrDraft is the draft plugin. This module does not import torch; ``model.py`` has the network."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from spec_draft_dflash2.candidate_draft import CandidateDraft
from spec_draft_dflash2.lilicorr.config import LiLiCorrConfig
from spec_draft_dflash2.lilicorr.shape import LiLiCorrShape
from spec_kit.drafting import TRAINED, num_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from spec_core import DraftConfig, TargetSpec
    from spec_core.records import ShardHints
    from spec_draft_dflash2.lilicorr.model import LiLiCorrModel
    from spec_draft_dflash2.lilicorr.proposer import LiLiCorrProposer
    from spec_kit.drafting import StepCost

_FIRST_NAMES = {
    ".feature_mlp.0.": ".feature_norm.",
    ".feature_mlp.1.": ".feature_mlp.up_proj.",
    ".feature_mlp.3.": ".feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
"""Parts of tensor names in Model-Optimizer's first exports -> the names that engines read now."""


class LiLiCorrDraft(CandidateDraft[LiLiCorrConfig, LiLiCorrShape]):
    """LiLiCorr (arXiv 2608.20530): DFlash or DFlash2, and a head that scores paths through the candidates.

    See ``spec_core.draft`` for the contract.
    """

    name: ClassVar[str] = "lilicorr"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[DraftConfig]] = LiLiCorrConfig
    Shape = LiLiCorrShape
    architecture: ClassVar[str] = LiLiCorrShape.architecture
    quantised_modules: ClassVar[tuple[str, ...]] = ()  # the path head's modules have the layers' names
    small_run: ClassVar[Mapping[str, object]] = {
        "block_size": 4,
        "num_layers": 2,
        "num_anchors": 64,
        "anchor_share": 1.0,
        "gamma": 2.0,  # the target accepts few guesses of a small draft
        "lilicorr_candidate_topk": 16,  # at a high temperature, fewer hold too little of the distribution
    }
    default_block_size: ClassVar[int] = 16
    learns_from_guesses: ClassVar[bool] = True
    serving_methods: ClassVar[Mapping[str, str]] = {"vllm": "dflash", "sglang": "DFLASH"}

    @classmethod
    def module_name(cls, stored_name: str) -> str:
        """Return a tensor's name in the module from its name in the file, which may be an earlier one."""
        name = super().module_name(stored_name)
        for first, now in _FIRST_NAMES.items():
            name = name.replace(first, now)
        return name

    def fresh_shape(self, target: TargetSpec) -> LiLiCorrShape:
        """Return the shape of a new draft, from the options, the paper's defaults and the target's sizes."""
        options = self.options
        taps = 2 if options.conv_kernel_size is None else options.conv_kernel_size
        width = options.lilicorr_hidden_size or min(1024, target.hidden_size)
        return LiLiCorrShape.for_target(
            options,
            target,
            conv_kernel_size=taps,
            conv_group_size=(options.conv_group_size or 16) if taps else 0,
            lilicorr_candidate_topk=options.lilicorr_candidate_topk or 8,
            lilicorr_hidden_size=width,
            lilicorr_num_layers=options.lilicorr_num_layers or 2,
            lilicorr_num_heads=options.lilicorr_num_heads or 8,
            lilicorr_mlp_ratio=options.lilicorr_mlp_ratio or 2.0,
            lilicorr_factor_dim=options.lilicorr_factor_dim or width,
            lilicorr_logit_scale=options.lilicorr_logit_scale or 8.0,
            lilicorr_vector_eps=options.lilicorr_vector_eps or 1e-4,
            **self.fresh_fields(target),
        )

    @property
    def guess_weights(self) -> Tensor:
        """Weights of the S guesses of a block in the head's and in the path's loss, float64 [S, 2]."""
        import torch

        head_S = super().guess_weights
        return torch.stack([head_S, torch.ones_like(head_S)], dim=1)

    def target_problem(self, target: TargetSpec) -> str | None:
        """Return what is wrong with the target, or None.

        vLLM gives the path head the candidates' embeddings as the target stores them, SGLang as the target uses them.
        """
        if target.embedding_scale != 1:
            return (
                f"its embedding is scaled ({target.embedding_scale}), an embedding without a scale is needed"
            )
        return super().target_problem(target)

    def step_cost(self, target: TargetSpec) -> StepCost:
        """Return the cost of a sample (D15): the backbone's, and the path head's for each candidate."""
        cost = super().step_cost(target)
        shape = self.shape(target)
        sizes = shape.tensor_shapes().items()
        weights = num_weights(size for name, size in sizes if name.startswith("lilicorr."))
        candidates = self.num_guesses * shape.num_candidates
        return replace(cost, per_row=cost.per_row + candidates * TRAINED * weights)

    def shard_hints(self, target: TargetSpec) -> ShardHints:
        """Return the backbone's hints.

        Every tensor-parallel rank has the whole path head, and the whole context for it. The path head's own
        parameters are no matrices.
        """
        hints = super().shard_hints(target)
        parallel = hints.tensor_parallel
        parallel = replace(parallel, all_tokens_out=(*parallel.all_tokens_out, "anchors"))
        return replace(hints, tensor_parallel=parallel, vocabulary=("lilicorr",))

    @classmethod
    def network(cls) -> tuple[type[LiLiCorrModel], type[LiLiCorrProposer]]:
        """Return the class of the module and the class of its proposers, which import torch."""
        from spec_draft_dflash2.lilicorr.model import LiLiCorrModel
        from spec_draft_dflash2.lilicorr.proposer import LiLiCorrProposer

        return LiLiCorrModel, LiLiCorrProposer
