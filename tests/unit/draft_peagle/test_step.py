"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from spec_core.kernels import no_kernel

from ..draft_dflash.cases import LLAMA3
from ..draft_eagle3.cases import make_batch, make_target
from ..draft_parts import assert_gradients, assert_same_without_gradients, gradients, make_ops
from .cases import denominators, give_elements, make_config, make_model, make_setting, random_documents
from .dense_reference import dense_peagle

CASES = {
    "cross-entropy": ({}, {}),
    "lk_alpha": ({"loss": "lk_alpha"}, {}),
    "lk_lambda": ({"loss": "lk_lambda", "vocab_size": 11}, {}),
    "nothing dropped": ({"retention": 1.0}, {}),
    "much dropped": ({"retention": 0.3, "least_retention": 0.0}, {}),
    "reduced vocabulary": ({"vocab_size": 9}, {}),
    "one guess": ({"num_guesses": 1}, {}),
    "chains longer than documents": ({"num_guesses": 40, "retention": 1.0}, {}),
    "one layer": ({"num_layers": 1}, {}),
    "three layers in segments": ({"num_layers": 3, "segment_tokens": 4, "retention": 1.0}, {}),
    "a segment for each row": ({"segment_tokens": 1, "vocab_size": 9}, {}),
    "llama3 rope": ({}, {"rope": LLAMA3}),
    "scaled logits": ({}, {"logit_scale": 0.3}),
}
LENGTHS = [9, 1, 14, 2, 3, 23]
GAPS = [0, 2, 0, 3, 1, 4]


def run_reference(module, documents, target):
    """Result and gradients in float64."""
    give_elements(module.config, documents)
    weights = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    wide = [replace(document, states=document.states.double()) for document in documents]
    result = dense_peagle(weights, wide, make_setting(target, module, torch.float64))
    (result.loss + 0 * sum(weight.sum() for weight in weights.values())).backward()
    return result, {name: weight.grad for name, weight in weights.items()}


def batch_of(documents, layout, dtype):
    """Ours, with the documents' rounds left out: they are Eagle3's."""
    for document in documents:
        document.rounds = None
    batch = make_batch(documents, *layout)
    return replace(batch, hidden_TNH=batch.hidden_TNH.to(dtype))


def assert_equals_the_reference(module, documents, target, layout, tolerance=1e-9, reference=None):
    """One step of ours in the batch ``layout``: (gaps, padding); ``reference``: what run_reference has returned."""
    dtype = next(module.parameters()).dtype
    counts = denominators(module.config, documents)
    output = module(batch_of(documents, layout, dtype), counts, make_ops(target, dtype))
    output.loss.backward()
    result, expected = reference or run_reference(module, documents, target)
    assert counts.chunk(2)[0].tolist() == output.counts["accuracy"].tolist() == result.counted
    torch.testing.assert_close(output.loss.double(), result.loss.detach(), rtol=tolerance, atol=1e-12)
    if any(result.counted):
        assert_gradients(gradients(module), expected, tolerance)
    return output, result


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chains to a chunk of attention, and several chunks; gradients summed over several chunks of logits."""
    monkeypatch.setattr("spec_kit.block_drafting.attention.CHUNK_BLOCKS", 4)
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 0)


@pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
@pytest.mark.usefixtures("small_chunks")
def test_loss_and_every_gradient_equal_the_dense_reference(options, changes):
    target, config = make_target(**changes), make_config(**options)
    documents, masked = random_documents(target, LENGTHS, 5), config.num_guesses > 1
    reference = run_reference(make_model(target, config), documents, target)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-4)):
        module = make_model(target, config, dtype)
        step = assert_equals_the_reference(module, documents, target, (GAPS, 0), tolerance, reference)
        assert step[0].loss.item() > 0.1
        for name, grad in gradients(module).items():
            assert grad.any() or (name == "mask_hidden" and not masked)


@pytest.mark.parametrize("seed", range(4))
def test_random_documents_and_layouts_equal_the_dense_reference(seed):
    draw = random.Random(seed)
    config = make_config(
        num_guesses=draw.randint(1, 6),
        retention=draw.choice([0.5, 0.8, 1.0]),
        segment_tokens=draw.choice([None, 1, 7, 100]),
    )
    target, lengths = make_target(), [draw.randint(1, 24) for _ in range(draw.randint(1, 5))]
    documents = random_documents(target, lengths, seed, supervised=draw.choice([0.5, 0.9, 1.0]))
    documents[-1].mask[:] = draw.random() < 0.5
    layout = [draw.randint(0, 3) for _ in lengths], draw.randint(0, 2)
    assert_equals_the_reference(make_model(target, config, torch.float64), documents, target, layout)


def test_metrics_equal_the_dense_reference():
    """Two tokens: guesses are right often enough for prefixes of every length."""
    target = make_target(vocab_size=2, eos_token_ids=(0,))
    config = make_config(retention=0.8)
    documents = random_documents(target, [60, 45, 7], 3, supervised=0.95)
    module = make_model(target, config, torch.float64)
    output, result = assert_equals_the_reference(module, documents, target, ([0, 1, 0], 0))
    assert all(result.prefixes)
    metrics = output.metrics()
    values = {"accuracy": result.agreed, "acceptance": result.acceptance, "guess_loss": result.guess_loss}
    for name, sums in values.items():
        ratios = [total / count for total, count in zip(sums, result.counted, strict=True)]
        assert metrics[name] == pytest.approx(ratios, rel=1e-9), name
    kept, reached = (part.tolist() for part in denominators(config, documents).chunk(2))
    length = (
        1 + sum(prefix / k * r for prefix, k, r in zip(result.prefixes, kept, reached, strict=True)) / kept[0]
    )
    assert metrics["acceptance_length"] == pytest.approx(length, rel=1e-9)


@pytest.mark.parametrize(
    ("segment_tokens", "kernel"), [(1, None), (5, no_kernel), (1000, None)], ids=["one", "plain", "whole"]
)
def test_segments_change_nothing(segment_tokens, kernel):
    """Documents lie across their edges; losses, metrics and gradients are those of the whole batch at once."""
    target = make_target()
    documents = random_documents(target, LENGTHS, 5)
    kernels = {} if kernel is None else {"kernel": kernel}
    outputs, found = [], []
    for size in (None, segment_tokens):
        config = make_config(segment_tokens=size)
        module = make_model(target, config, torch.float64, **kernels)
        batch = batch_of(documents, (GAPS, 0), torch.float64)
        outputs.append(module(batch, denominators(config, documents), make_ops(target, torch.float64)))
        outputs[-1].loss.backward()
        found.append(gradients(module))
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss, rtol=1e-12, atol=0)
    assert outputs[1].metrics() == pytest.approx(outputs[0].metrics(), rel=1e-12) or all(
        torch.allclose(outputs[1].sums[name].double(), value.double(), rtol=1e-12)
        for name, value in outputs[0].sums.items()
    )
    assert_gradients(found[1], found[0], 1e-11)


def test_nothing_of_another_document_reaches_a_chain():
    """Tokens behind the document, other documents and padding may be anything."""
    target, config = make_target(), make_config(retention=1.0, segment_tokens=6)
    module, ops = make_model(target, config, torch.float64), make_ops(target, torch.float64)
    documents = random_documents(target, [12, 10, 11], 4)
    documents[0].mask[:], documents[2].mask[:] = False, False
    counts, batch = denominators(config, documents), batch_of(documents, ([2, 0, 1], 0), torch.float64)
    output = module(batch, counts, ops)
    output.loss.backward()
    expected = gradients(module)
    batch.hidden_TNH[:14] = -1e3
    batch.hidden_TNH[24:] = 1e3
    batch.input_ids_T[:14] = 5
    batch.input_ids_T[24:] = 7
    module.zero_grad()
    again = module(batch, counts, ops)
    again.loss.backward()
    torch.testing.assert_close(again.loss, output.loss, rtol=1e-12, atol=0)
    assert_gradients(gradients(module), expected, 1e-11)


def test_evaluation_without_gradients_gives_the_same_numbers():
    target, config = make_target(), make_config(segment_tokens=8)
    module, documents = make_model(target, config), random_documents(target, LENGTHS, 5)
    arguments = (
        batch_of(documents, (GAPS, 0), torch.float32),
        denominators(config, documents),
        make_ops(target),
    )
    assert_same_without_gradients(module, arguments)
