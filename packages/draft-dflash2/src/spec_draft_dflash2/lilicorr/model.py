"""Define the LiLiCorr network: the backbone, the path head, and the loss over guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import functional as F

from spec_core import to_device_async
from spec_draft_dflash2.lilicorr.head import PathHead
from spec_draft_dflash2.lilicorr.loss import PathInputs, PathLoss
from spec_draft_dflash2.model import DFlash2Layer
from spec_kit.block_drafting import BlockBackbone, BlockHead, BlockRule, Blocks, guess_weights

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_core.records import DraftBatch, StepOutput
    from spec_draft_dflash2.kernels import DFlash2Kernels
    from spec_draft_dflash2.lilicorr.config import LiLiCorrConfig
    from spec_draft_dflash2.lilicorr.shape import LiLiCorrShape
    from spec_kit.block_drafting import Geometry


class LiLiCorrModel(BlockBackbone):
    """The single-device module of the draft; see ``spec_core.draft`` for the contract of ``forward``."""

    layer_type = DFlash2Layer
    shape: LiLiCorrShape
    config: LiLiCorrConfig
    kernels: DFlash2Kernels

    def __init__(self, shape: LiLiCorrShape, *parts: Any) -> None:
        """Create the network and its path head; ``parts`` are the other arguments of BlockBackbone."""
        super().__init__(shape, *parts)
        self.lilicorr = PathHead(shape)
        self.anchors = nn.Identity()

    def forward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps) -> StepOutput:
        """Return loss and metrics, divided by the global batch's ``denominators``, float64 [D]."""
        num_guesses = self.shape.block_size - 1
        device = batch.input_ids_T.device
        blocks = Blocks.of(batch, BlockRule(self.config, num_guesses))
        fused_CH, geometry = self.surroundings(batch, blocks)
        anchors = self.anchor_states(fused_CH, geometry)
        states_ABH = self.slot_states(batch, blocks, ops, fused_CH, geometry)
        loss = PathLoss(
            ops=ops,
            head=BlockHead.of(ops, self),
            kernels=self.kernels,
            options=self.config,
            shape=self.shape,
            weight_S=to_device_async(guess_weights(num_guesses, self.config.gamma), device),
            path_head=self.lilicorr,
        )
        return loss(PathInputs(states_ABH[:, 1:], *anchors), batch, blocks, denominators)

    def anchor_states(self, fused_CH: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Return the context at the last token before each block [A, H], and whether there is one, bool [A].

        The norm is computed here once more, and not by its module: the output of that module enters divided layers
        only, so that tensor-parallel ranks sum its gradient. ``anchors`` is where they gather the tokens.
        """
        norm = self.hidden_norm
        normed_CH = F.rms_norm(fused_CH, norm.normalized_shape, norm.weight, norm.eps)
        rows = geometry.rows
        anchor_A, start_A = geometry.layout.on_device
        assert rows is not None
        (context_CH,) = rows.gather(self.anchors(normed_CH))
        return context_CH[(anchor_A - 1).clamp(min=0)], anchor_A > start_A
