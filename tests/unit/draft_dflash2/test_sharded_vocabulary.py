"""Two shards of the vocabulary, reduced through ``ops`` only, give the whole vocabulary's loss and gradients."""

from functools import partial

import pytest
import torch

from spec_draft_dflash2.draft import DFlash2Draft
from spec_draft_dflash2.loss import SelectorInputs, SelectorLoss
from spec_kit.block_drafting import BlockKernels, BlockRule, Blocks, CountedGuesses, guess_weights

from ..draft_batches import make_batch, random_documents
from ..draft_parts import CPU, assert_shards_agree, make_target
from .cases import SIZES, make_config

GUESSES = 3
MIXED = {"ce_weight": 0.4, "soft_weight": 0.6}


def run(ops, top_k):
    """Loss and metrics, and the gradients of random inputs."""
    documents = random_documents(make_target(), [14, 9], 3, num_states=6, dtype=torch.float64)
    batch, config = make_batch(documents, [1, 0]), make_config(selector_top_k=top_k, **MIXED)
    blocks = Blocks.of(batch, BlockRule(50, GUESSES))
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    places, rank = (len(blocks.anchor_A), GUESSES), SIZES["selector_rank"]
    inputs = SelectorInputs(draw(*places, 16), draw(*places, rank), draw(29, rank))
    loss = SelectorLoss(
        ops=ops,
        kernels=BlockKernels(),
        options=config,
        shape=DFlash2Draft(config).shape(make_target()),
        weight_S=guess_weights(GUESSES, 4.0),
    )
    output = loss(inputs, batch, CountedGuesses.of(blocks, CPU), torch.tensor([7.0], dtype=torch.float64))
    output.loss.backward()
    return output, [tensor.grad for tensor in inputs.tensors]


@pytest.mark.parametrize(("cut", "top_k"), [(17, 5), (26, 5), (17, 29)], ids=str)
def test_shards_agree_with_the_whole(cut, top_k):
    """Also where a shard has fewer tokens than there are candidates."""
    assert_shards_agree(partial(run, top_k=top_k), cut)
