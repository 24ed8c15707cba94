"""Define the DFlash2 network: the backbone with convolutions, the selector, and the loss over guesses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from spec_core import to_device_async
from spec_draft_dflash2.convolution import convolution
from spec_draft_dflash2.loss import SelectorInputs, SelectorLoss
from spec_draft_dflash2.selector import CandidateSelector
from spec_kit.block_drafting import (
    BlockBackbone,
    BlockHead,
    BlockLayer,
    BlockRule,
    Blocks,
    CountedGuesses,
    guess_weights,
)

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_core.records import DraftBatch, StepOutput
    from spec_draft_dflash2.config import DFlash2Config
    from spec_draft_dflash2.kernels import DFlash2Kernels
    from spec_draft_dflash2.shape import CandidateShape, DFlash2Shape
    from spec_kit.block_drafting import Geometry, KeysValues


class DFlash2Layer(BlockLayer):
    """A decoder layer with convolutions around its attention and around its MLP, if the shape has any."""

    def __init__(self, shape: CandidateShape, index: int, kernels: DFlash2Kernels) -> None:
        """Make the layer with this index; its convolutions start as the identity."""
        super().__init__(shape, index, kernels)
        self.attention_conv = convolution(shape, kernels)
        self.mlp_conv = convolution(shape, kernels)

    def advance(self, x_ABH: Tensor, context: KeysValues, geometry: Geometry) -> Tensor:
        """Return the blocks' states after the layer. Only the slots are convolved, not the context."""
        attend = partial(self.attend, context=context, geometry=geometry)
        x_ABH = x_ABH + self.attention_conv(self.input_layernorm(x_ABH), attend)
        return x_ABH + self.mlp_conv(self.post_attention_layernorm(x_ABH), self.mlp)


class DFlash2Model(BlockBackbone):
    """The single-device module of the draft; see ``spec_core.draft`` for the contract of ``forward``."""

    layer_type = DFlash2Layer
    shape: DFlash2Shape
    config: DFlash2Config
    kernels: DFlash2Kernels

    def __init__(self, shape: DFlash2Shape, *parts: Any) -> None:
        """Create the network and its selector; ``parts`` are the other arguments of BlockBackbone."""
        super().__init__(shape, *parts)
        self.candidate_selector = CandidateSelector(shape)

    def forward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps) -> StepOutput:
        """Return loss and metrics, divided by the global batch's ``denominators``, float64 [D]."""
        num_guesses = self.shape.block_size - 1
        device = batch.input_ids_T.device
        blocks = Blocks.of(batch, BlockRule(self.config, num_guesses))
        states_ASH = self.states(batch, blocks, ops)[:, 1:]
        context_ASr = self.candidate_selector.context(states_ASH, blocks.tokens_before(batch, num_guesses))
        loss = SelectorLoss(
            ops=ops,
            head=BlockHead.of(ops, self),
            kernels=self.kernels,
            options=self.config,
            shape=self.shape,
            weight_S=to_device_async(guess_weights(num_guesses, self.config.gamma), device),
        )
        inputs = SelectorInputs(states_ASH, context_ASr, self.candidate_selector.successor_codebook)
        return loss(inputs, batch, CountedGuesses.of(blocks, device), denominators)
