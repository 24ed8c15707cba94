"""This library is for drafts that guess blocks, such as DFlash (docs/libraries/block_drafting.md)."""

from typing import TYPE_CHECKING

from spec_kit.block_drafting.block_draft import BlockDraft
from spec_kit.block_drafting.block_shape import MOST_LAYERS, BlockConfig, BlockShape, LayerType
from spec_kit.block_drafting.mask_token import choose_mask_token
from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.block_drafting.attention import BlockLayout, KeysValues, block_attention
    from spec_kit.block_drafting.backbone import BlockBackbone, BlockLayer, Geometry
    from spec_kit.block_drafting.blocks import (
        BlockRule,
        Blocks,
        CountedGuesses,
        guess_weights,
        sample_generator,
    )
    from spec_kit.block_drafting.head import BlockHead
    from spec_kit.block_drafting.judged_guesses import GuessFactors, RefusedLosses
    from spec_kit.block_drafting.kernels import BlockKernels
    from spec_kit.block_drafting.metrics import GuessMetrics, loss_scale
    from spec_kit.block_drafting.proposer import BlockProposer
    from spec_kit.block_drafting.teacher import teacher_of_guesses
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "MOST_LAYERS",
    "BlockBackbone",
    "BlockConfig",
    "BlockDraft",
    "BlockHead",
    "BlockKernels",
    "BlockLayer",
    "BlockLayout",
    "BlockProposer",
    "BlockRule",
    "BlockShape",
    "Blocks",
    "CountedGuesses",
    "Geometry",
    "GuessFactors",
    "GuessMetrics",
    "KeysValues",
    "LayerType",
    "RefusedLosses",
    "block_attention",
    "choose_mask_token",
    "guess_weights",
    "loss_scale",
    "sample_generator",
    "teacher_of_guesses",
]
