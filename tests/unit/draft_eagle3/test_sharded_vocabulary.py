"""Two shards of the vocabulary, reduced through ``ops`` only, give the whole vocabulary's loss and gradients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spec_core import LinearWeight
from spec_kit.chain_drafting import ChainKernels, HeadLoss, SupervisedRows

from ..draft_parts import Exchange, ShardOps, make_ops, make_tensors
from .cases import make_batch, make_target, random_documents

NUM_STEPS, CUT = 3, 17


def run(ops, head_VH, ids_V, kind):
    """Loss share, metrics, and gradients of the states and of these head rows."""
    target = make_target()
    documents = random_documents(target, [14, 9], seed=3)
    batch = make_batch(documents, [1, 0])
    states = torch.randn(
        NUM_STEPS, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    head_VH = head_VH.clone().requires_grad_()
    vocab_mask_V = torch.zeros(29, dtype=torch.bool)
    vocab_mask_V[::2] = True
    vocabulary = {"head": LinearWeight(head_VH), "ids_V": ids_V, "vocab_mask_V": vocab_mask_V}
    loss = HeadLoss(**vocabulary, kind=kind, ops=ops, kernels=ChainKernels())
    weight_S = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    output = loss(list(states.unbind()), batch.hidden_TNH[:, -1].double(), SupervisedRows.of(batch), weight_S)
    output.loss.backward()
    return output, states.grad, head_VH.grad


@pytest.mark.parametrize("kind", ["ce", "lk_alpha", "lk_lambda"])
def test_shards_agree_with_the_whole(kind):
    target, exchange = make_target(), Exchange()
    ids_V = torch.arange(0, 29, 2)
    head_VH = torch.randn(15, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, grad_states, grad_head = run(make_ops(target, torch.float64), head_VH, ids_V, kind)
    parts = ids_V < CUT, ids_V >= CUT
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(
                run,
                ShardOps(target, make_tensors(target), rank, CUT, exchange),
                head_VH[part],
                ids_V[part],
                kind,
            )
            for rank, part in enumerate(parts)
        ]
        results = [call.result() for call in calls]
    for (output, shard_grad_states, shard_grad_head), part in zip(results, parts, strict=True):
        torch.testing.assert_close(output.loss, whole.loss)
        torch.testing.assert_close(output.metrics(), whole.metrics())
        torch.testing.assert_close(shard_grad_states, grad_states)
        torch.testing.assert_close(shard_grad_head, grad_head[part])
