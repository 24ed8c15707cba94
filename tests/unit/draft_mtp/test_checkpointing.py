"""Activations that are computed again in the backward pass: the same step, and what is kept for it."""

import pytest
import torch

from spec_backend_cpu.kernels import KERNELS
from spec_core import no_kernel
from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.draft import MtpDraft

from ..draft_parts import KeptForBackward, assert_gradients
from .cases import CASES, LENGTHS, SIZES, make_module, random_documents, run, shipped, target_and_tensors

WIDTH, INNER = SIZES["hidden_size"], SIZES["intermediate_size"]
QUERIES, KEYS = (SIZES[name] * SIZES["head_dim"] for name in ("num_heads", "num_kv_heads"))


def step(folder, kernel=no_kernel, options=(), changes=(), documents=(LENGTHS, 0.35), *, recompute):
    """A module, its step's output, and what was kept for the backward pass."""
    target, tensors = target_and_tensors(folder, **dict(changes))
    config = MtpConfig(checkpoint_activations=recompute, **dict(options))
    module = make_module(target, tensors, config, kernel)
    with KeptForBackward() as kept:
        output, _ = run(module, MtpDraft(config), random_documents(target, *documents), target, tensors)
    return module, output, kept.num_bytes


@pytest.mark.parametrize("kernel", [no_kernel, KERNELS.get], ids=["plain", "kernel"])
@pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
def test_loss_and_gradients_of_packed_documents_stay_the_same(options, changes, kernel, tmp_path):
    steps = [step(tmp_path, kernel, options, changes, recompute=flag)[:2] for flag in (False, True)]
    (_, plain), (_, again) = steps
    assert again.loss.item() == pytest.approx(plain.loss.item(), rel=1e-12)
    assert all(torch.equal(again.counts[name], value) for name, value in plain.counts.items())
    gradients = []
    for module, output in steps:
        output.loss.backward()
        gradients.append({name: parameter.grad for name, parameter in module.named_parameters()})
    assert_gradients(gradients[1], gradients[0], 1e-12)


def test_a_further_step_keeps_its_output_keys_and_values_alone(tmp_path):
    """In float64. The loss keeps the gradient of each step's output, too, with the key and without."""
    num_tokens, per_row = 400, {}
    for flag in (False, True):
        kept = [
            step(tmp_path, KERNELS.get, {"num_steps": steps}, documents=([num_tokens], 0.0), recompute=flag)[
                2
            ]
            for steps in (6, 7)
        ]
        per_row[flag] = (kept[1] - kept[0]) / num_tokens / 8
    assert per_row[True] <= 2 * WIDTH + 2 * KEYS + 1
    assert per_row[False] >= per_row[True] + 2 * QUERIES + 3 * INNER + 2 * WIDTH


@pytest.mark.parametrize("kind", ["glm4_moe", "glm4_moe_lite"])
def test_the_counted_values_are_outputs_keys_and_values(kind, tmp_path):
    """Values of latent attention are narrower than keys: 5 of 10 channels here."""
    draft, target, *_ = shipped(tmp_path, kind, num_steps=2, checkpoint_activations=True)
    heads, width, value = (4, 10, 5) if kind == "glm4_moe_lite" else (2, 8, 8)
    assert draft.cost(target).saved_values(9, 7) == 7 * 2 * (WIDTH + heads * (width + value))


def test_latent_attention_keeps_no_more_of_its_values_than_their_width(tmp_path):
    """Keys and values come out of one projection, whose output is not kept for the values' sake."""
    num_tokens, kept = 400, []
    for steps in (6, 7):
        options = {"num_steps": steps, "checkpoint_activations": True}
        draft, target, tensors, _ = shipped(tmp_path, "glm4_moe_lite", **options)
        module = draft.build(target, tensors, None, KERNELS.get).double()
        with KeptForBackward() as counted:
            run(module, draft, random_documents(target, [num_tokens], 0.0), target, tensors)
        kept.append(counted.num_bytes)
    assert (kept[1] - kept[0]) / num_tokens / 8 <= 2 * WIDTH + 4 * (10 + 5) + 1
