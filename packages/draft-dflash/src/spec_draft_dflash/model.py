"""Define the DFlash network: the block-draft backbone, and the loss over its guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core import to_device_async
from spec_draft_dflash.loss import BlockLoss
from spec_kit.block_drafting import (
    BlockBackbone,
    BlockHead,
    BlockRule,
    Blocks,
    CountedGuesses,
    guess_weights,
)

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_core.records import DraftBatch, StepOutput
    from spec_draft_dflash.config import DFlashConfig
    from spec_draft_dflash.kernels import DFlashKernels


class DFlashModel(BlockBackbone):
    """The single-device module of the draft; see ``spec_core.draft`` for the contract of ``forward``."""

    config: DFlashConfig
    kernels: DFlashKernels

    def forward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps) -> StepOutput:
        """Return loss and metrics, divided by the global batch's ``denominators``, float64 [D]."""
        block_size = self.shape.block_size
        device = batch.input_ids_T.device
        blocks = Blocks.of(batch, BlockRule(self.config, block_size - 1))
        guesses = CountedGuesses.of(blocks, device)
        weight_S = guess_weights(block_size - 1, self.config.decay(block_size))
        states_ABH = self.states(batch, blocks, ops)
        loss = BlockLoss(
            ops=ops,
            head=BlockHead.of(ops, self),
            kernels=self.kernels,
            kind=self.config.loss,
            weight_S=to_device_async(weight_S, device),
            alpha=self.config.dpace_alpha,
            opd=self.config.opd,
        )
        return loss(states_ABH[:, 1:], batch, guesses, denominators)
