"""Activations that are computed again in the backward pass: what is kept for it."""

import gc

import pytest
import torch

from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft

from ..draft_batches import GAPS, LENGTHS, make_batch, random_documents, step_arguments
from ..draft_parts import KeptForBackward, make_ops, make_target
from .cases import make_model

WIDTH, INNER, QUERIES, KEYS = 16, 24, 4 * 8, 2 * 8


def train_a_step(*, recompute: bool) -> None:
    config, target = Eagle3Config(num_steps=3, num_layers=2, checkpoint_activations=recompute), make_target()
    documents = random_documents(target, LENGTHS, seed=3)
    module = make_model(target, config)
    module(*step_arguments(Eagle3Draft(config), target, documents, GAPS)).loss.backward()


def kept(num_steps: int, num_layers: int, num_tokens: int, *, recompute: bool) -> int:
    """Bytes that are kept of the unrolled steps for the backward pass."""
    target = make_target()
    config = Eagle3Config(num_steps=num_steps, num_layers=num_layers, checkpoint_activations=recompute)
    documents = random_documents(target, [num_tokens], seed=1, supervised=1.0)
    module, batch, ops = make_model(target, config), make_batch(documents, [0]), make_ops(target)
    with KeptForBackward() as counted:
        states, _ = module.unroll(batch, ops)
    assert len(states) == num_steps
    return counted.num_bytes


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_further_step_keeps_states_keys_and_values_alone(num_layers):
    """Each row keeps what enters each layer, its keys and values, and the final norm's output and scale."""
    num_tokens, steps = 400, 6
    per_row = {}
    for flag in (False, True):
        sizes = [kept(count, num_layers, num_tokens, recompute=flag) for count in (steps, steps + 1)]
        per_row[flag] = (sizes[1] - sizes[0]) / num_tokens / 4
    channels = num_layers * (WIDTH + 2 * KEYS) + 2 * WIDTH + 1
    row_of_padding = QUERIES + 2 * KEYS  # behind the embedded tokens
    assert per_row[True] <= channels + row_of_padding / num_tokens
    assert per_row[False] >= channels + num_layers * (2 * QUERIES + 3 * INNER)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "computed again"])
def test_a_step_leaves_no_tensor_for_pythons_garbage_collector(recompute):
    """A trainer collects rarely: what lies in reference cycles of many steps would fill a device."""
    train_a_step(recompute=recompute)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        train_a_step(recompute=recompute)
        gc.collect()
        left = [found for found in gc.garbage if isinstance(found, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left
