"""Activations that are computed again in the backward pass: the same step, and what is kept for it."""

from __future__ import annotations

import gc

import pytest
import torch

from spec_backend_cpu.kernels import KERNELS
from spec_core import no_kernel
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft

from ..draft_batches import GAPS, LENGTHS, make_batch, random_documents, step_arguments
from ..draft_parts import KeptForBackward, assert_gradients, gradients, make_ops, make_target
from .cases import MLA, make_model

WIDTH, INNER, QUERIES, KEYS = 16, 24, 4 * 8, 2 * 8


def trained(options, kernel, *, recompute: bool):
    target, dtype = make_target(), torch.float64
    config = Eagle3Config(checkpoint_activations=recompute, **options)
    documents = random_documents(target, LENGTHS, seed=3, dtype=dtype)
    module = make_model(target, config, dtype, kernel)
    output = module(*step_arguments(Eagle3Draft(config), target, documents, GAPS, 3))
    output.loss.backward()
    return output, gradients(module)


@pytest.mark.parametrize("kernel", [KERNELS.get, no_kernel], ids=["kernel", "chunked"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_steps": 4},
        {"num_steps": 3, "num_layers": 2, "vocab_size": 11, "fc_norm": False, "norm_output": False},
        {"num_steps": 3, "num_layers": 2, **MLA},
    ],
    ids=["one layer", "two layers", "mla"],
)
def test_loss_and_gradients_of_packed_documents_stay_the_same(options, kernel):
    (plain, expected), (again, got) = (trained(options, kernel, recompute=flag) for flag in (False, True))
    assert again.loss.item() == pytest.approx(plain.loss.item(), rel=1e-12)
    assert_gradients(got, expected, 1e-12)
    assert all(torch.equal(again.counts[name], value) for name, value in plain.counts.items())


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
    trained({"num_steps": 3, "num_layers": 2}, KERNELS.get, recompute=recompute)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        trained({"num_steps": 3, "num_layers": 2}, KERNELS.get, recompute=recompute)
        gc.collect()
        left = [found for found in gc.garbage if isinstance(found, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left
