"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from spec_backend_cpu.kernels import KERNELS
from spec_core import no_kernel
from spec_core.records import Supervision
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft
from spec_kit.chain_drafting import NeededRows, attention

from ..draft_parts import (
    assert_bfloat16_is_close,
    assert_gradients,
    assert_same_without_gradients,
    gradients,
    make_ops,
)
from .cases import (
    MLA,
    decode,
    guess_depth,
    make_batch,
    make_model,
    make_setting,
    make_target,
    random_documents,
)
from .dense_reference import dense_eagle3

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
PARTIAL = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}

WITHOUT_NORMS = {"fc_norm": False, "norm_output": False}
CASES = {
    "plain": ({}, {}),
    "reduced vocabulary": ({"vocab_size": 11}, {}),
    "one step": ({"num_steps": 1}, {}),
    "seven steps": ({"num_steps": 7, "step_decay": 0.5}, {}),
    "no norms": (WITHOUT_NORMS, {}),
    "fc norm": ({"norm_output": False}, {}),
    "norm output": ({"fc_norm": False}, {}),
    "no norms, reduced": ({**WITHOUT_NORMS, "vocab_size": 11}, {}),
    "lk alpha": ({"loss": "lk_alpha"}, {}),
    "lk alpha, reduced": ({"loss": "lk_alpha", "vocab_size": 17}, {}),
    "lk lambda": ({"loss": "lk_lambda"}, {}),
    "lk lambda, reduced": ({"loss": "lk_lambda", "vocab_size": 17}, {}),
    "llama3 rope": ({}, {"rope": LLAMA3}),
    "yarn rope": ({}, {"rope": YARN}),
    "partial rope": ({}, {"rope": PARTIAL}),
    "two layers": ({"num_layers": 2}, {}),
    "three layers, no norms, reduced": (
        {**WITHOUT_NORMS, "num_layers": 3, "vocab_size": 11},
        {"rope": LLAMA3},
    ),
    "no groups, scaled logits": ({}, {"num_kv_heads": 4, "logit_scale": 0.3}),
    "mla": (MLA, {}),
    "mla, yarn": (MLA, {"rope": YARN}),
    "mla, two layers, no norms, reduced": ({**MLA, **WITHOUT_NORMS, "num_layers": 2, "vocab_size": 11}, {}),
    "mla, one head, values as wide as keys": ({**MLA, "v_head_dim": 10}, {"num_heads": 1, "num_kv_heads": 1}),
    "one key head": ({}, {"num_kv_heads": 1, "num_layers": 36}),
}
LENGTHS = [9, 1, 14, 2, 3, 23]
GAPS = [0, 2, 0, 3, 1, 4]
ATTENTIONS = {"kernel": KERNELS.get, "chunked": no_kernel}
PRECISIONS = [(torch.float64, 1e-9), (torch.float32, 1e-4)]


def denominators(config, documents):
    samples = [
        Supervision(sample_id=0, epoch=0, loss_mask=document.mask, guess_depth=guess_depth(document))
        for document in documents
    ]
    return Eagle3Draft(config).denominators(samples)


def run_reference(module, documents, target):
    """Result and gradients in float64."""
    weights = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    for document in documents:
        document.states = document.states.double()
    result = dense_eagle3(weights, documents, make_setting(target, module, torch.float64))
    # Also without a single label every weight has its (zero) gradient.
    (result.loss + 0 * sum(weight.sum() for weight in weights.values())).backward()
    return result, {name: weight.grad for name, weight in weights.items()}


def assert_equals_the_reference(target, config, documents, kernels, gaps=GAPS):
    """A step with a backend's attention in float64, and with the chunked one in float32, which documents are in."""
    batch, counts = make_batch(documents, gaps), denominators(config, documents)
    result, expected = run_reference(make_model(target, config), documents, target)
    assert result.loss.item() > 0.1
    for kernel, (dtype, tolerance) in zip(kernels, PRECISIONS, strict=False):
        module = make_model(target, config, dtype, kernel)
        given = replace(batch, hidden_TNH=batch.hidden_TNH.to(dtype))
        output = module(given, counts, make_ops(target, dtype))
        output.loss.backward()
        assert counts.tolist() == result.labelled == output.counts["accuracy"].tolist()
        assert abs(output.loss.item() - result.loss.item()) <= tolerance * result.loss.item()
        assert_gradients(gradients(module), expected, tolerance)
    return result


@pytest.fixture
def small_chunks(monkeypatch):
    """The chunked attention is computed in chunks of six or seven queries."""
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * 4 * 23 * 7)


@pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
def test_loss_and_every_gradient_equal_the_dense_reference(options, changes, small_chunks, monkeypatch):
    # Three positions per chunk, so that gradients are summed over several chunks.
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 3 * 4 * (29 + 4 * 29))
    target, config = make_target(**changes), Eagle3Config(**{"num_steps": 4, **options})
    documents = random_documents(target, LENGTHS, seed=5)
    assert_equals_the_reference(target, config, documents, ATTENTIONS.values())


@pytest.mark.parametrize("seed", range(5))
def test_random_documents_and_layouts_equal_the_dense_reference(seed):
    draw = random.Random(seed)
    kind = draw.choice(["ce", "lk_alpha", "lk_lambda"])
    options = {"vocab_size": draw.choice([None, 5, 20]), "fc_norm": draw.random() < 0.5, "loss": kind}
    options |= MLA if seed % 2 else {}
    config = Eagle3Config(num_steps=draw.randint(1, 6), norm_output=draw.random() < 0.5, **options)
    target, lengths = make_target(), [draw.randint(1, 17) for _ in range(draw.randint(1, 5))]
    module, documents = make_model(target, config, torch.float64), random_documents(target, lengths, seed)
    documents[0].mask[:] = draw.random() < 0.5
    for document in documents:
        document.states = document.states.double()
    batch = make_batch(documents, [draw.randint(0, 3) for _ in lengths])
    output = module(batch, denominators(config, documents), make_ops(target, torch.float64))
    output.loss.backward()
    result, expected = run_reference(module, documents, target)
    torch.testing.assert_close(output.loss.detach(), result.loss.detach(), rtol=1e-9, atol=1e-12)
    for name, grad in gradients(module).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("has_prompts", [True, False], ids=["prompts first", "scattered"])
def test_any_share_of_supervised_tokens_equals_the_dense_reference(
    num_layers, share, has_prompts, small_chunks
):
    """Rows that no loss reads are left out: behind it the reference computes every row of every step."""
    target, config = make_target(), Eagle3Config(num_steps=4, num_layers=num_layers, vocab_size=20)
    documents = random_documents(target, LENGTHS, seed=7)
    for document in documents:
        document.states, length = document.states.double(), len(document.ids)
        place = torch.arange(length) / length if has_prompts else torch.rand(length)
        document.mask = place >= 1 - share
    batch = make_batch(documents, GAPS, padding=2)
    result, expected = run_reference(make_model(target, config, torch.float64), documents, target)
    for kernel in ATTENTIONS.values():
        module = make_model(target, config, torch.float64, kernel)
        output = module(batch, denominators(config, documents), make_ops(target, torch.float64))
        output.loss.backward()
        torch.testing.assert_close(output.loss.detach(), result.loss.detach(), rtol=1e-9, atol=1e-12)
        for name, grad in gradients(module).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("num_layers", "options"), [(1, {}), (2, MLA)], ids=["one layer", "two, mla"])
def test_rows_that_are_nearly_all_needed_are_computed_in_place(num_layers, options, monkeypatch):
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * 4 * 150 * 16)  # 16 queries of the longer document
    target, config = make_target(), Eagle3Config(num_steps=2, num_layers=num_layers, **options)
    documents = random_documents(target, [90, 150], seed=7)
    for document in documents:
        document.mask[:] = True
    gaps = [0, 2]
    assert NeededRows.of(make_batch(documents, gaps), config.num_steps).are_all
    assert_equals_the_reference(target, config, documents, ATTENTIONS.values(), gaps)


@pytest.mark.parametrize("kind", ["ce", "lk_alpha", "lk_lambda"])
def test_guesses_that_were_judged_equal_the_dense_reference(kind, monkeypatch):
    """Rounds of three guesses, of which a draft with two steps trains two, and one with five steps all three."""
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 3 * 4 * (29 + 4 * 29))
    for steps in (2, 5):
        target, config = make_target(), Eagle3Config(num_steps=steps, loss=kind, vocab_size=17)
        documents = random_documents(target, LENGTHS, seed=5)
        decode(documents, seed=steps)
        result = assert_equals_the_reference(target, config, documents, [KERNELS.get])
        assert [count > 0 for count in result.labelled] == [step < 3 for step in range(steps)]


@pytest.mark.parametrize("vocab_size", [None, 4])
def test_metrics_equal_the_dense_reference(vocab_size):
    """Six tokens: arg-maxima agree often enough for chains of every length."""
    target = make_target(vocab_size=6, eos_token_ids=(0,))
    config = Eagle3Config(num_steps=3, vocab_size=vocab_size)
    module, documents = make_model(target, config, torch.float64), random_documents(target, [60, 45, 7], 3)
    for document in documents:
        document.states = document.states.double()
    counts = denominators(config, documents)
    output = module(make_batch(documents, [0, 1, 0]), counts, make_ops(target, torch.float64))
    result, _ = run_reference(module, documents, target)
    assert counts.tolist() == result.labelled == output.counts["accuracy"].tolist()
    assert sum(result.agreed) > 20
    assert result.chain_sum > result.labelled[0] + 10
    metrics = output.metrics()
    ratios = {
        "accuracy": result.agreed,
        "acceptance": result.acceptance,
        "step_loss": result.step_loss,
    }
    for name, sums in ratios.items():
        expected = [total / count for total, count in zip(sums, result.labelled, strict=True)]
        assert metrics[name] == pytest.approx(expected, rel=1e-9), name
    assert metrics["acceptance_length"] == pytest.approx(result.chain_sum / result.labelled[0], rel=1e-12)


def test_fully_supervised_chain_that_always_agrees_has_full_length():
    """The draft's head and states cannot tell tokens apart, nor can the target: all agree, so 1 + S where every
    later step is labelled too."""
    target, config = make_target(), Eagle3Config(num_steps=3)
    module, ops = make_model(target, config), make_ops(target)
    with torch.no_grad():
        module.lm_head.weight.zero_()
        ops._head_VH.zero_()
    (document,) = random_documents(target, [12], 1)
    document.mask[:] = True
    metrics = module(make_batch([document], [0]), denominators(config, [document]), ops).metrics()
    assert metrics["accuracy"] == [1.0, 1.0, 1.0]
    # Ten rows are labelled at step 0; the last two of them at one and two steps only.
    assert metrics["acceptance_length"] == pytest.approx((8 * 4 + 3 + 2) / 10)


@pytest.mark.parametrize("vocab_size", [None, 11])
def test_features_that_are_not_finite_give_a_loss_that_is_not(vocab_size):
    """A run ends with that loss, and its cause: no arg-max is looked up outside the vocabulary."""
    target, config = make_target(), Eagle3Config(num_steps=2, vocab_size=vocab_size)
    module, documents = make_model(target, config), random_documents(target, [9, 7], seed=5)
    documents[0].states[:] = torch.nan
    output = module(make_batch(documents, [0, 0]), denominators(config, documents), make_ops(target))
    assert output.loss.isnan()


def test_bfloat16_stays_close_to_float32():
    target, config = make_target(), Eagle3Config(num_steps=4, vocab_size=20)
    module, documents = make_model(target, config), random_documents(target, [40, 30], seed=5)
    batch, counts = make_batch(documents, [0, 0]), denominators(config, documents)
    assert_bfloat16_is_close(module, batch, counts, lambda dtype: make_ops(target, dtype))


def test_evaluation_without_gradients_gives_the_same_numbers():
    target, config = make_target(), Eagle3Config(num_steps=3)
    module, documents = make_model(target, config), random_documents(target, LENGTHS, seed=5)
    arguments = make_batch(documents, GAPS), denominators(config, documents), make_ops(target)
    assert_same_without_gradients(module, arguments)


def test_denominators_count_supervised_tokens_with_enough_tokens_before_them():
    mask = torch.tensor([True, True, True, False, True, True])
    sample = Supervision(sample_id=0, epoch=0, loss_mask=mask)
    short = Supervision(sample_id=1, epoch=0, loss_mask=torch.tensor([True]))
    got = Eagle3Draft(Eagle3Config(num_steps=5)).denominators([sample, short])
    assert got.dtype == torch.float64
    assert got.tolist() == [3, 2, 2, 1, 0]
