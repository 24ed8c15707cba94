"""Two shards of the vocabulary, reduced through ``ops`` only, give the whole vocabulary's loss and gradients."""

from functools import partial

import pytest
import torch

from spec_draft_dspark.loss import GuessLoss, HeadInputs
from spec_kit.block_drafting import BlockKernels, BlockRule, Blocks, CountedGuesses, guess_weights

from ..draft_batches import make_batch, random_documents
from ..draft_parts import CPU, assert_shards_agree, make_target
from .cases import RANK, make_config

GUESSES = 4


def run(ops, confidence):
    """Loss and metrics, and the gradients of random inputs; W2's is of the local rows."""
    documents = random_documents(make_target(), [14, 9], 3, num_states=6, dtype=torch.float64)
    batch = make_batch(documents, [1, 0])
    blocks = Blocks.of(batch, BlockRule(50, GUESSES))
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    places = len(blocks.anchor_A), GUESSES
    states, bias, table, raw = draw(*places, 16), draw(*places, RANK), draw(29, RANK), draw(*places)
    inputs = HeadInputs(
        states_ASH=states.requires_grad_(),
        bias_ASr=bias.requires_grad_(),
        bias_Vr=table[slice(*ops.vocab_range)].clone().requires_grad_(),
        confidence_AS=raw.requires_grad_() if confidence else None,
    )
    weight_S = guess_weights(GUESSES, 4.0)
    loss = GuessLoss(ops=ops, kernels=BlockKernels(), options=make_config(), weight_S=weight_S)
    output = loss(inputs, batch, CountedGuesses.of(blocks, CPU), torch.tensor([7.0], dtype=torch.float64))
    output.loss.backward()
    return output, [tensor.grad for tensor in inputs.tensors]


@pytest.mark.parametrize("confidence", [True, False])
def test_shards_agree_with_the_whole(confidence):
    assert_shards_agree(partial(run, confidence=confidence), rows=[2])
