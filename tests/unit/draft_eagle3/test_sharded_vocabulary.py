"""Two shards of the vocabulary, reduced through ``ops`` only, give the whole vocabulary's loss and gradients."""

from functools import partial

import pytest
import torch

from spec_core import LinearWeight
from spec_kit.chain_drafting import ChainKernels, HeadLoss, SupervisedRows

from ..draft_batches import make_batch, random_documents
from ..draft_parts import assert_shards_agree, make_target

NUM_STEPS = 3


def run(ops, kind):
    """Loss share, metrics, and gradients of the states and of the local rows of the head, which has even ids."""
    documents = random_documents(make_target(), [14, 9], seed=3, dtype=torch.float64)
    batch, draw = make_batch(documents, [1, 0]), torch.Generator().manual_seed(1)
    states = torch.randn(NUM_STEPS, 24, 16, dtype=torch.float64, generator=draw).requires_grad_()
    head_VH = torch.randn(29, 16, dtype=torch.float64, generator=draw).requires_grad_()
    vocab_mask_V, (first, stop) = torch.arange(29) % 2 == 0, ops.vocab_range
    ids_V = torch.arange(first, stop)[vocab_mask_V[first:stop]]
    vocabulary = {"head": LinearWeight(head_VH[ids_V]), "ids_V": ids_V, "vocab_mask_V": vocab_mask_V}
    loss = HeadLoss(**vocabulary, kind=kind, ops=ops, kernels=ChainKernels())
    weight_S = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    output = loss(list(states.unbind()), batch.hidden_TNH[:, -1], SupervisedRows.of(batch), weight_S)
    output.loss.backward()
    return output, [states.grad, head_VH.grad[first:stop]]


@pytest.mark.parametrize("kind", ["ce", "lk_alpha", "lk_lambda"])
def test_shards_agree_with_the_whole(kind):
    assert_shards_agree(partial(run, kind=kind), rows=[1])
