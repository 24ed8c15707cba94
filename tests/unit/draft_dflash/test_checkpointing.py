"""Activations that are computed again in the backward pass: the same step, and what is kept for it."""

from __future__ import annotations

import pytest
import torch

from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.draft import DFlashDraft
from spec_kit.block_drafting import BlockRule, Blocks

from ..draft_batches import denominators, make_batch, random_documents
from ..draft_parts import KeptForBackward, assert_gradients, make_ops, make_target
from .cases import make_model


def options(num_layers: int, *, recompute: bool, **own) -> DFlashConfig:
    return DFlashConfig(
        block_size=5, num_layers=num_layers, num_features=3, checkpoint_activations=recompute, **own
    )


def trained(own, *, recompute: bool):
    target, dtype = make_target(), torch.float64
    config = options(2, recompute=recompute, **own)
    documents = random_documents(target, [9, 1, 14, 2, 3, 23], 3, 4, dtype)
    module, batch = make_model(target, config, dtype), make_batch(documents, [0, 2, 0, 3, 1, 4], 3)
    output = module(batch, denominators(DFlashDraft(config), documents), make_ops(target, dtype))
    output.loss.backward()
    return output, {name: value.grad for name, value in module.named_parameters()}


@pytest.mark.parametrize(
    "own", [{}, {"sliding_window": 6}, {"loss": "soft"}], ids=["full", "sliding", "soft"]
)
def test_loss_and_gradients_of_packed_documents_stay_the_same(own):
    (plain, expected), (again, got) = (trained(own, recompute=flag) for flag in (False, True))
    assert again.loss.item() == pytest.approx(plain.loss.item(), rel=1e-12)
    assert_gradients(got, expected, 1e-12)
    assert all(torch.equal(again.counts[name], value) for name, value in plain.counts.items())


def kept(num_layers: int, *, recompute: bool) -> tuple[int, int]:
    """Bytes that are kept of the layers for the backward pass, and the number of slots."""
    target, config = make_target(), options(num_layers, recompute=recompute)
    documents = random_documents(target, [400], 1, 4)
    module, batch, ops = make_model(target, config), make_batch(documents, [0]), make_ops(target)
    blocks = Blocks.of(batch, BlockRule(config.num_anchors, 4))
    with KeptForBackward() as counted:
        states_ABH = module.states(batch, blocks, ops)
    return counted.num_bytes, states_ABH.shape[:2].numel()


def test_a_further_layer_keeps_its_input_alone():
    per_slot = {}
    for flag in (False, True):
        (fewer, slots), (more, _) = (kept(count, recompute=flag) for count in (2, 3))
        per_slot[flag] = (more - fewer) / slots / 4
    assert per_slot[True] == 16
    assert per_slot[False] > 16 * 16
