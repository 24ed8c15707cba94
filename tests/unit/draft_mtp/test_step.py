"""Loss and every gradient of a step against the dense float64 reference, and where the first state is taken."""

import pytest
import torch

from spec_backend_cpu.kernels import KERNELS
from spec_core import no_kernel
from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.draft import MtpDraft

from ..draft_parts import assert_gradients
from .cases import CASES, LENGTHS, make_module, random_documents, run, setting_of, target_and_tensors
from .dense_reference import dense_mtp

DOCUMENTS = {"some rows needed": (LENGTHS, 0.35), "nearly all rows needed": ([200], 0.0)}
"""Lengths, and the share of the tokens that are not supervised."""


def reference(module, documents, target, tensors):
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    loss, counts = dense_mtp(weights, documents, setting_of(module, target, tensors))
    loss.backward()
    return loss.item(), counts, {name: weight.grad for name, weight in weights.items()}


@pytest.mark.parametrize("kernel", [no_kernel, KERNELS.get], ids=["plain", "kernel"])
@pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("layout", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_loss_and_every_gradient_equal_the_dense_reference(
    layout, options, changes, kernel, tmp_path, monkeypatch
):
    # Three positions per chunk, so that gradients are summed over several chunks.
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 3 * 4 * (29 + 4 * 29))
    target, tensors = target_and_tensors(tmp_path, **changes)
    config = MtpConfig(**options)
    module, documents = make_module(target, tensors, config, kernel), random_documents(target, *layout)
    output, counts = run(module, MtpDraft(config), documents, target, tensors)
    output.loss.backward()
    loss, labelled, expected = reference(module, documents, target, tensors)
    assert loss > 0.1
    assert counts.tolist() == labelled == output.counts["accuracy"].tolist()
    assert abs(output.loss.item() - loss) <= 1e-9 * loss
    assert_gradients({name: p.grad for name, p in module.named_parameters()}, expected, 1e-9)


def test_the_first_state_is_behind_the_targets_final_norm(tmp_path):
    """Engines hand over what the target's model returns. Channels are scaled by the norm's weight: a state in front
    of it is another one even behind the head's own norm, and nothing fails."""
    target, tensors = target_and_tensors(tmp_path, norm="rms_plus_one")
    module, (document, *_) = make_module(target, tensors, MtpConfig()), random_documents(target)
    state_TH = module.first_state(document.states[:, None])
    mean = document.states.pow(2).mean(-1, keepdim=True)
    behind_TH = document.states / torch.sqrt(mean + target.norm_eps) * tensors.norm_H.double()
    torch.testing.assert_close(state_TH, behind_TH, rtol=1e-6, atol=1e-7)
    own_norm = module.mtp.pre_fc_norm_hidden
    assert not torch.allclose(own_norm(state_TH), own_norm(document.states), rtol=1e-2)
