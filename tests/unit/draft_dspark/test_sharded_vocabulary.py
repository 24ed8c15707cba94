"""Two shards of the vocabulary, reduced through ``ops`` only, give the whole vocabulary's loss and gradients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spec_draft_dspark.loss import GuessLoss, HeadInputs
from spec_kit.block_drafting import BlockKernels, BlockRule, Blocks, CountedGuesses, guess_weights

from ..draft_dflash.cases import make_batch, random_documents
from ..draft_parts import CPU, Exchange, ShardOps, make_ops, make_target, make_tensors
from .cases import RANK, make_config

CUT, GUESSES = 17, 4


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
    target, exchange = make_target(), Exchange()
    whole, expected = run(make_ops(target, torch.float64), confidence)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(run, ShardOps(target, make_tensors(target), rank, CUT, exchange), confidence)
            for rank in (0, 1)
        ]
        results = [call.result() for call in calls]
    rows = slice(0, CUT), slice(CUT, None)
    for (output, grads), own in zip(results, rows, strict=True):
        torch.testing.assert_close(output.loss, whole.loss)
        torch.testing.assert_close(output.metrics(), whole.metrics())
        torch.testing.assert_close(grads, [*expected[:2], expected[2][own], *expected[3:]])
