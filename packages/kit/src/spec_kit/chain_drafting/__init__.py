"""This library is for drafts that guess chains, such as Eagle3 (docs/libraries/chain_drafting.md)."""

from typing import TYPE_CHECKING

from spec_kit.chain_drafting.chain_draft import ChainDraft
from spec_kit.chain_drafting.chain_shape import ChainConfig, ChainShape
from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.chain_drafting.attention import Places, UnrolledAttention, take_rows
    from spec_kit.chain_drafting.chain_module import ChainModule
    from spec_kit.chain_drafting.input_tokens import InputTokens
    from spec_kit.chain_drafting.kernels import ChainKernels
    from spec_kit.chain_drafting.labels import (
        NeededRows,
        SupervisedRows,
        count_judged,
        count_labels,
        judged_weights,
        step_weights,
    )
    from spec_kit.chain_drafting.loss import HeadLoss
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "ChainConfig",
    "ChainDraft",
    "ChainKernels",
    "ChainModule",
    "ChainShape",
    "HeadLoss",
    "InputTokens",
    "NeededRows",
    "Places",
    "SupervisedRows",
    "UnrolledAttention",
    "count_judged",
    "count_labels",
    "judged_weights",
    "step_weights",
    "take_rows",
]
