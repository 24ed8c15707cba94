"""TargetOps against transformers: the teacher's logits are the target's own."""

import pytest
import torch
import transformers

from spec_kit.layers import TargetOps
from spec_kit.targets import read_target, read_target_tensors

TARGETS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama in shards": ("llama", {"shard_bytes": 30_000}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "granite": ("granite", {"logits_scaling": 8.0, "embedding_multiplier": 3.0}),
}


@pytest.fixture(params=TARGETS.values(), ids=TARGETS.keys())
def folder(make_target, request):
    shape, options = request.param
    return make_target(shape, **options)


def ops_of(folder, dtype=torch.float32):
    target = read_target(folder)
    return TargetOps(target, read_target_tensors(target), torch.device("cpu"), dtype)


@torch.no_grad()
def run_target(folder, input_ids):
    """Logits, the embeddings' output and the input of the final norm, from transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    seen = []
    model.base_model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    output = model(input_ids, output_hidden_states=True)
    return output.logits, output.hidden_states[0], seen[0]


def test_teacher_logits_are_those_of_the_target(folder):
    input_ids = torch.arange(1, 40)[None]
    logits, _, hidden = run_target(folder, input_ids)
    taught = ops_of(folder).teacher_logits(hidden[0])
    assert logits.std() > 0.01
    torch.testing.assert_close(taught, logits[0], rtol=1e-5, atol=1e-5)


def test_embedding_times_its_scale_is_what_enters_the_first_layer(folder):
    input_ids = torch.arange(1, 40)[None]
    _, embedded, _ = run_target(folder, input_ids)
    rows = ops_of(folder).embed(input_ids)
    torch.testing.assert_close(rows * read_target(folder).embedding_scale, embedded)


def test_states_behind_the_targets_norm_times_the_head_are_its_logits(folder):
    """O4: what a draft multiplies that shares the head; the target's scale and soft-cap are not part of it."""
    target, ops = read_target(folder), ops_of(folder)
    hidden_RH = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(0))
    normed = torch.nn.functional.rms_norm(
        hidden_RH, (target.hidden_size,), read_target_tensors(target).norm_H, target.norm_eps
    )
    logits = normed @ ops.head_VH.T * target.logit_scale
    if target.logit_softcap is not None:
        logits = target.logit_softcap * torch.tanh(logits / target.logit_softcap)
    assert not ops.head_VH.requires_grad
    torch.testing.assert_close(logits, ops.teacher_logits(hidden_RH), rtol=1e-5, atol=1e-5)


def test_teacher_logits_are_close_in_bfloat16(make_target):
    folder = make_target("llama")
    logits, _, hidden = run_target(folder, torch.arange(1, 40)[None])
    taught = ops_of(folder, torch.bfloat16).teacher_logits(hidden[0].bfloat16())
    assert taught.dtype == torch.bfloat16
    assert (taught.float() - logits[0]).abs().max() < 0.05 * logits.abs().max()


def test_nothing_of_the_target_takes_a_gradient(make_target):
    ops = ops_of(make_target("llama"))
    hidden = torch.randn(3, 32, requires_grad=True)
    assert not ops.teacher_logits(hidden).requires_grad
    assert not ops.embed(torch.tensor([1, 2])).requires_grad
