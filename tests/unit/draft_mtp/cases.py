"""Tiny targets, heads and documents of the tests of MTP heads, in ours and in the dense reference's terms."""

import dataclasses

import torch

from spec_core import no_kernel
from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.draft import MtpDraft
from spec_kit.layers import TargetOps
from spec_testing.toy_target import ToySample, toy_batch, toy_target, toy_tensors

from ...mtp_targets import random_head, write_config, write_head
from ..draft_batches import LENGTHS
from ..draft_parts import CPU
from .dense_reference import Document, Setting

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
ROPES = {
    "qwen3_5_moe": {**ROPE, "partial_rotary_factor": 0.25},
    "glm4_moe": {**ROPE, "partial_rotary_factor": 0.5},
}
CASES = {
    "plain": ({}, {}),
    "Qwen3.5's": ({}, {"norm": "rms_plus_one", "rope": {**ROPE, "partial_rotary_factor": 0.25}}),
    "one step": ({"num_steps": 1}, {}),
    "six steps": ({"num_steps": 6, "step_decay": 0.6}, {"num_kv_heads": 1}),
}


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


def shipped(folder, kind, **options):
    """A target that ships with a head, and a draft that starts from it."""
    norm = "rms_plus_one" if kind.startswith("qwen") else "rms"
    target, tensors = target_and_tensors(folder, norm=norm, rope=ROPES.get(kind, ROPE))
    fields = write_config(kind, target)
    write_head(folder, random_head(fields))
    draft = MtpDraft(MtpConfig(init_from=folder, **options))
    return draft, target, tensors, fields


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
