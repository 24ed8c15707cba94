"""Loss and every gradient of a step against the dense float64 reference, and where the first state is taken."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spec_backend_cpu.kernels import KERNELS
from spec_core import no_kernel
from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.draft import MtpDraft
from spec_kit.drafting import TargetOps
from spec_testing.toy_target import ToySample, toy_batch, toy_target, toy_tensors

from ..draft_parts import assert_gradients
from .dense_reference import Document, Setting, dense_mtp

CPU = torch.device("cpu")
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
CASES = {
    "plain": ({}, {}),
    "Qwen3.5's": ({}, {"norm": "rms_plus_one", "rope": {**ROPE, "partial_rotary_factor": 0.25}}),
    "one step": ({"num_steps": 1}, {}),
    "six steps": ({"num_steps": 6, "step_decay": 0.6}, {"num_kv_heads": 1}),
}
LENGTHS = [9, 1, 14, 2, 3, 23]
DOCUMENTS = {
    "some rows needed": (LENGTHS, 0.35),
    "nearly all rows needed": ([200], 0.0),
}
"""Lengths, and the share of the tokens that are not supervised."""


def target_and_tensors(folder, **changes):
    target = toy_target(folder, **{**SIZES, "vocab_size": 29, "rope": ROPE, **changes})
    tensors = toy_tensors(target)
    norm_H = (tensors.norm_H * 1024).round() / 1024  # 1 + w is then exact
    stored_H = norm_H - float(target.norm == "rms_plus_one")
    return target, dataclasses.replace(tensors, norm_H=norm_H, others={target.norm_name: stored_H})


def make_module(target, tensors, config, kernel=no_kernel):
    """A head whose weights are large enough that every part of it matters."""
    torch.manual_seed(2)
    module = MtpDraft(config).build(target, tensors, None, kernel)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module.double()


def random_documents(target, lengths=LENGTHS, unsupervised=0.35):
    generator = torch.Generator().manual_seed(5)
    return [
        Document(
            ids=torch.randint(target.vocab_size, (length,), generator=generator),
            states=torch.randn(length, target.hidden_size, generator=generator).double(),
            mask=torch.rand(length, generator=generator) >= unsupervised,
        )
        for length in lengths
    ]


def setting_of(module, target, tensors):
    """The dense reference's arguments besides the head's weights and the documents."""
    return Setting(
        embedding=tensors.embedding_VH.double(),
        target_head=tensors.head_VH.double(),
        target_norm=tensors.norm_H.double(),
        heads=target.num_heads,
        head_dim=target.head_dim,
        rotated=int(target.head_dim * target.rope.get("partial_rotary_factor", 1.0)),
        theta=target.rope["rope_theta"],
        eps=target.norm_eps,
        steps=module.config.num_steps,
        decay=module.config.step_decay,
    )


def reference(module, documents, target, tensors):
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    loss, counts = dense_mtp(weights, documents, setting_of(module, target, tensors))
    loss.backward()
    return loss.item(), counts, {name: weight.grad for name, weight in weights.items()}


def run(module, draft, documents, target, tensors):
    samples = [
        ToySample(number, document.ids, document.states[:, None], document.mask)
        for number, document in enumerate(documents)
    ]
    batch = toy_batch(samples, draft.required_features(target), width=6)
    states_TNH = torch.zeros(batch.hidden_TNH.shape, dtype=torch.float64)
    for span, document in zip(batch.spans, documents, strict=True):
        states_TNH[span.start : span.stop, 0] = document.states
    counts = draft.denominators([sample.supervision for sample in samples])
    ops = TargetOps(target, tensors, CPU, torch.float64)
    return module(dataclasses.replace(batch, hidden_TNH=states_TNH), counts, ops), counts


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
