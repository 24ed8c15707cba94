"""Two shards of the vocabulary, reduced through ``ops`` only, give the whole vocabulary's loss and gradients."""

from functools import partial

import pytest
import torch

from spec_draft_dflash.kernels import DFlashKernels
from spec_draft_dflash.loss import BlockLoss
from spec_kit.block_drafting import BlockRule, Blocks, CountedGuesses, guess_weights

from ..draft_batches import make_batch, random_documents
from ..draft_parts import CPU, assert_shards_agree, make_target

BLOCK = 5


def run(ops, kind):
    """Loss, metrics and the gradient of random states of the head."""
    documents = random_documents(make_target(), [14, 9], 3, num_states=6, dtype=torch.float64)
    batch = make_batch(documents, [1, 0])
    blocks = Blocks.of(batch, BlockRule(50, BLOCK - 1))
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(len(blocks.anchor_A), BLOCK - 1, 16, dtype=torch.float64, generator=generator)
    states.requires_grad_()
    weight_S = guess_weights(BLOCK - 1, BLOCK / 2)
    loss = BlockLoss(ops=ops, kernels=DFlashKernels(), kind=kind, weight_S=weight_S, alpha=0.5)
    output = loss(states, batch, CountedGuesses.of(blocks, CPU), torch.tensor([7.0], dtype=torch.float64))
    output.loss.backward()
    return output, [states.grad]


@pytest.mark.parametrize("kind", ["ce", "dpace", "soft", "lk_alpha", "lk_lambda"])
def test_shards_agree_with_the_whole(kind):
    assert_shards_agree(partial(run, kind=kind))
