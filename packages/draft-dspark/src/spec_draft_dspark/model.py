"""Define the DSpark network: the block-draft backbone, its heads, and the loss over the guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_core import to_device_async
from spec_draft_dspark.heads import MARKOV_HEADS, ConfidenceHead
from spec_draft_dspark.loss import GuessLoss, HeadInputs
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
    from spec_draft_dspark.config import DSparkConfig
    from spec_draft_dspark.shape import DSparkShape


class DSparkModel(BlockBackbone):
    """The single-device module of the draft; see ``spec_core.draft`` for the contract of ``forward``."""

    shape: DSparkShape
    config: DSparkConfig

    def __init__(self, shape: DSparkShape, *parts: Any) -> None:
        """Create the network and its heads; ``parts`` are the other arguments of BlockBackbone."""
        super().__init__(shape, *parts)
        self.markov_head = MARKOV_HEADS[shape.markov_head](shape)
        self.confidence_head = ConfidenceHead(shape) if shape.confidence else None

    def forward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps) -> StepOutput:
        """Return loss and metrics, divided by the global batch's ``denominators``, float64 [D]."""
        num_guesses = self.shape.num_guesses
        device = batch.input_ids_T.device
        blocks = Blocks.of(batch, BlockRule(self.config, num_guesses))
        weight_S = to_device_async(guess_weights(num_guesses, self.config.gamma), device)
        states_ASH = self.states(batch, blocks, ops)[:, -num_guesses:]
        inputs = self.head_inputs(states_ASH, blocks.tokens_before(batch, num_guesses))
        loss = GuessLoss(
            ops=ops,
            head=BlockHead.of(ops, self),
            kernels=self.kernels,
            options=self.config,
            weight_S=weight_S,
        )
        return loss(inputs, batch, CountedGuesses.of(blocks, device), denominators)

    def head_inputs(self, states_ASH: Tensor, before_AS: Tensor) -> HeadInputs:
        """Return the inputs of the loss. ``before_AS``: the token before each guess."""
        embedded_ASr = self.markov_head.embed(before_AS)
        confidence = self.confidence_head
        return HeadInputs(
            states_ASH=states_ASH,
            bias_ASr=self.markov_head(states_ASH, embedded_ASr),
            bias_Vr=self.markov_head.markov_w2.weight,
            confidence_AS=None if confidence is None else confidence(states_ASH, embedded_ASr),
        )
