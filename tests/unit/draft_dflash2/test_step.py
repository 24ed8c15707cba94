"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ..draft_dflash.cases import LLAMA3, decode, make_batch, make_ops, make_target, random_documents
from ..draft_dflash.dense_reference import Document, counted_slots
from ..draft_parts import assert_gradients
from .cases import denominators, give_anchors, make_config, make_model, make_selector, make_setting
from .dense_reference import dense_dflash2

CASES = {
    "soft": ({}, {}),
    "tokens": ({"ce_weight": 1.0, "soft_weight": 0.0}, {}),
    "both, other weights": ({"ce_weight": 0.7, "soft_weight": 0.2, "selector_weight": 3.0, "gamma": 1.3}, {}),
    "one guess": ({"block_size": 2}, {}),
    "three taps": ({"block_size": 6, "num_layers": 1, "conv_kernel_size": 3, "conv_group_size": 1}, {}),
    "one tap": ({"num_layers": 1, "conv_kernel_size": 1, "conv_group_size": 16}, {}),
    "one candidate": ({"selector_top_k": 1}, {}),
    "every token is a candidate": ({"selector_top_k": 29, "ce_weight": 0.5}, {}),
    "blocks longer than documents": ({"block_size": 30, "num_layers": 1}, {}),
    "llama3 rope": ({}, {"rope": LLAMA3}),
    "scaled embedding": ({}, {"embedding_scale": 3.0}),
}
LENGTHS = [9, 1, 14, 2, 3, 23]
GAPS = [0, 2, 0, 3, 1, 4]


def documents_of(target, lengths, seed, dtype=torch.float64) -> list[Document]:
    """Five captured layers, and the input of the final norm."""
    return random_documents(target, lengths, seed, 6, dtype)


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


def run_reference(module, documents, target):
    """Result and gradients in float64."""
    if documents[0].rounds is None:
        give_anchors(module.config, documents)
    weights = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    wide = [replace(document, states=document.states.double()) for document in documents]
    result = dense_dflash2(weights, wide, make_setting(target, module, torch.float64), make_selector(module))
    (result.loss + 0 * sum(weight.sum() for weight in weights.values())).backward()
    return result, {name: weight.grad for name, weight in weights.items()}


def assert_equals_the_reference(module, documents, target, layout, tolerance=1e-9, reference=None):
    """One step of ours in the batch ``layout``: (gaps, padding); ``reference``: what run_reference has returned."""
    dtype = next(module.parameters()).dtype
    counts = denominators(module.config, documents)
    given = [replace(document, states=document.states.to(dtype)) for document in documents]
    output = module(make_batch(given, *layout), counts, make_ops(target, dtype))
    output.loss.backward()
    result, expected = reference or run_reference(module, documents, target)
    assert counts.item() == pytest.approx(result.denominator, rel=1e-12)
    assert output.counts["accuracy"].tolist() == result.counted
    torch.testing.assert_close(output.loss.double(), result.loss.detach(), rtol=tolerance, atol=1e-12)
    if any(result.counted):
        assert_gradients(gradients(module), expected, tolerance)
    return output, result


@pytest.fixture
def small_chunks(monkeypatch):
    """Several blocks to a chunk of attention, and several chunks; gradients summed over several chunks of logits."""
    monkeypatch.setattr("spec_kit.block_drafting.attention.CHUNK_BLOCKS", 4)
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 0)


@pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
@pytest.mark.usefixtures("small_chunks")
def test_loss_and_every_gradient_equal_the_dense_reference(options, changes):
    target, config = make_target(**changes), make_config(**options)
    documents = documents_of(target, LENGTHS, 5, torch.float32)
    reference = run_reference(make_model(target, config), documents, target)
    untrained = {"candidate_selector"} if config.selector_top_k == 1 else set()
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        module = make_model(target, config, dtype)
        step = assert_equals_the_reference(module, documents, target, (GAPS, 0), tolerance, reference)
        assert step[0].loss.item() > 0.1
        for name, grad in gradients(module).items():
            assert grad.any() or name.partition(".")[0] in untrained


@pytest.mark.parametrize("seed", range(6))
def test_random_documents_and_layouts_equal_the_dense_reference(seed):
    draw = random.Random(seed)
    config = make_config(block_size=draw.randint(2, 7), num_anchors=draw.choice([1, 3, 50]))
    target, lengths = make_target(), [draw.randint(1, 24) for _ in range(draw.randint(1, 5))]
    documents = documents_of(target, lengths, seed)
    documents[-1].mask[:] = draw.random() < 0.5
    layout = [draw.randint(0, 3) for _ in lengths], draw.randint(0, 2)
    assert_equals_the_reference(make_model(target, config, torch.float64), documents, target, layout)


def test_guesses_that_were_judged_equal_the_dense_reference():
    """Rounds of three guesses: blocks of two guesses train two of them, blocks of five all three."""
    for guesses in (2, 5):
        config = make_config(block_size=guesses + 1, num_anchors=50)
        target = make_target()
        documents = documents_of(target, LENGTHS, 5)
        decode(documents, seed=guesses)
        for document in documents:
            document.anchors = [
                last for last in document.rounds if counted_slots(document, last, guesses + 1)
            ]
        module = make_model(target, config, torch.float64)
        _, result = assert_equals_the_reference(module, documents, target, (GAPS, 0))
        assert [count > 0 for count in result.counted] == [place < 3 for place in range(guesses)]


def test_metrics_equal_the_dense_reference():
    """Three tokens: guesses are right often enough for prefixes of every length."""
    target, config = (
        make_target(vocab_size=3, eos_token_ids=(0,)),
        make_config(num_anchors=40, selector_top_k=2),
    )
    documents = documents_of(target, [60, 45, 7], 3)
    module = make_model(target, config, torch.float64)
    output, result = assert_equals_the_reference(module, documents, target, ([0, 1, 0], 0))
    assert {1, 2, 3} <= set(result.lengths)
    metrics = output.metrics()
    sums = {
        "accuracy": result.correct,
        "head_accuracy": result.head_correct,
        "recall": result.recalled,
    }
    assert result.correct != result.head_correct
    for name, totals in sums.items():
        ratios = [total / count for total, count in zip(totals, result.counted, strict=True)]
        assert metrics[name] == pytest.approx(ratios, rel=1e-9), name
    expected = sum(result.lengths) / len(result.lengths)
    assert metrics["acceptance_length"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_any_number_of_ranks_takes_the_same_step(num_ranks):
    """Rank r trains every ``num_ranks``-th sample; the denominator is the global batch's."""
    target, config = make_target(), make_config(num_anchors=4)
    module = make_model(target, config, torch.float64)
    documents = documents_of(target, LENGTHS, 5)
    counts, ops = denominators(config, documents), make_ops(target, torch.float64)
    whole = module(make_batch(documents, GAPS), counts, ops)
    whole.loss.backward()
    expected = gradients(module)
    module.zero_grad()
    ids = list(range(len(documents)))[::-1]
    parts = [ids[rank::num_ranks] for rank in range(num_ranks)]
    shares = [
        module(make_batch([documents[i] for i in part], [6] * len(part), ids=part), counts, ops)
        for part in parts
    ]
    total = sum(shares[1:], shares[0])
    total.loss.backward()
    torch.testing.assert_close(total.loss, whole.loss, rtol=1e-12, atol=0)
    assert_gradients(gradients(module), expected, 1e-12)
    for name, value in whole.sums.items():
        torch.testing.assert_close(total.sums[name].double(), value.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [[1], [2, 1], [9, 4]], ids=str)
def test_batch_without_anchors_gives_zero_loss_and_zero_gradients(lengths):
    target, config = make_target(), make_config()
    module, documents = make_model(target, config), documents_of(target, lengths, 1, torch.float32)
    for document in documents:
        document.mask[:] = torch.arange(len(document.mask)) % 2 == 0
    for count in (0.0, 7.0):
        module.zero_grad()
        output = module(
            make_batch(documents, [0] * len(lengths)),
            torch.tensor([count], dtype=torch.float64),
            make_ops(target),
        )
        output.loss.backward()
        assert output.loss.item() == 0
        assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def test_nothing_of_another_document_reaches_a_block():
    """Tokens behind the document, other documents and padding may be anything; features from the anchor on, too,
    but for the teacher's."""
    target, config = make_target(), make_config(num_anchors=1)
    module, ops = make_model(target, config, torch.float64), make_ops(target, torch.float64)
    documents = documents_of(target, [12, 10, 11], 4)
    for document in documents:
        document.mask[:] = False
    documents[1].mask[7:] = True
    counts, batch = denominators(config, documents), make_batch(documents, [2, 0, 1])
    give_anchors(config, documents)
    output = module(batch, counts, ops)
    output.loss.backward()
    expected = gradients(module)
    (anchor,) = documents[1].anchors
    batch.hidden_TNH[:14] = -1e3
    batch.hidden_TNH[24:] = 1e3
    batch.hidden_TNH[14 + anchor :, :5] = 1e3
    batch.input_ids_T[:14] = 5
    batch.input_ids_T[24:] = 7
    module.zero_grad()
    again = module(batch, counts, ops)
    again.loss.backward()
    assert torch.equal(again.loss, output.loss)
    assert_gradients(gradients(module), expected, 0)


def test_bfloat16_stays_close_to_float32():
    target, config = make_target(), make_config()
    module, documents = make_model(target, config), documents_of(target, [40, 30], 5, torch.float32)
    batch, counts = make_batch(documents, [0, 0]), denominators(config, documents)
    expected = module(batch, counts, make_ops(target)).loss
    half = module.to(torch.bfloat16)
    output = half(batch, counts, make_ops(target, torch.bfloat16))
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(expected.item(), rel=0.03)
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in half.parameters())


def test_evaluation_without_gradients_gives_the_same_numbers():
    target, config = make_target(), make_config()
    module, documents = make_model(target, config), documents_of(target, LENGTHS, 5, torch.float32)
    arguments = make_batch(documents, GAPS), denominators(config, documents), make_ops(target)
    trained = module(*arguments)
    with torch.no_grad():
        evaluated = module(*arguments)
    assert not evaluated.loss.requires_grad
    assert torch.equal(evaluated.loss, trained.loss.detach())
    assert evaluated.metrics() == trained.metrics()
