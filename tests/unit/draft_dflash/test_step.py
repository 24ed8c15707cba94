"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from spec_draft_dflash.config import DFlashConfig

from ..draft_parts import (
    assert_bfloat16_is_close,
    assert_gradients,
    assert_same_without_gradients,
    gradients,
    make_ops,
    make_target,
)
from .cases import (
    LLAMA3,
    decode,
    denominators,
    give_anchors,
    make_batch,
    make_model,
    make_setting,
    random_documents,
)
from .dense_reference import SOFT, Document, counted_slots, dense_dflash

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
FULL, SLIDING = "full_attention", "sliding_attention"
CASES = {
    "full": ({}, {}),
    "sliding": ({"sliding_window": 6}, {}),
    "window of one block": ({"sliding_window": 5}, {}),
    "mixed": ({"layer_types": (SLIDING, FULL), "sliding_window": 7}, {}),
    "mixed, full first": (
        {"layer_types": (FULL, SLIDING, SLIDING), "sliding_window": 5, "num_layers": 3},
        {},
    ),
    "d-pace": ({"loss": "dpace"}, {}),
    "d-pace, sliding, other alpha": ({"loss": "dpace", "sliding_window": 6, "dpace_alpha": 0.2}, {}),
    "soft": ({"loss": "soft"}, {}),
    "lk_alpha": ({"loss": "lk_alpha"}, {}),
    "lk_lambda": ({"loss": "lk_lambda", "sliding_window": 6}, {}),
    "soft, sliding": ({"loss": "soft", "sliding_window": 8}, {}),
    "blocks of two": ({"block_size": 2}, {}),
    "blocks of sixteen": ({"block_size": 16, "num_layers": 1}, {}),
    "blocks longer than documents": ({"block_size": 30, "num_layers": 1}, {}),
    "other gamma and mask": ({"gamma": 1.3, "mask_token_id": 7}, {}),
    "two features": ({"layers": (1, 6)}, {}),
    "one feature": ({"num_features": 1}, {}),
    "llama3 rope": ({}, {"rope": LLAMA3}),
    "yarn rope": ({}, {"rope": YARN}),
    "scaled embedding": ({}, {"embedding_scale": 3.0}),
    "no groups": ({}, {"num_kv_heads": 4}),
    "one key head": ({}, {"num_kv_heads": 1, "num_layers": 36}),
}
LENGTHS = [9, 1, 14, 2, 3, 23]
GAPS = [0, 2, 0, 3, 1, 4]
PRECISIONS = [(torch.float64, 1e-9), (torch.float32, 1e-4)]


def make_config(**options):
    return DFlashConfig(**{"block_size": 5, "num_layers": 2, "num_anchors": 6, **options})


def num_states(config):
    features = len(config.layers or ()) or config.num_features or 5
    return features + (config.loss in SOFT)


def run_reference(module, documents, target):
    """Result and gradients in float64."""
    if documents[0].rounds is None:
        give_anchors(module.config, documents)
    weights = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    wide = [replace(document, states=document.states.double()) for document in documents]
    result = dense_dflash(weights, wide, make_setting(target, module, torch.float64))
    # Also without a single anchor every weight has its (zero) gradient.
    (result.loss + 0 * sum(weight.sum() for weight in weights.values())).backward()
    return result, {name: weight.grad for name, weight in weights.items()}


def assert_equals_the_reference(target, config, documents):
    """A step in each precision; documents are in float32."""
    result, expected = run_reference(make_model(target, config), documents, target)
    assert result.loss.item() > 0.1
    for dtype, tolerance in PRECISIONS:
        module, counts = make_model(target, config, dtype), denominators(config, documents)
        batch = make_batch(
            [replace(document, states=document.states.to(dtype)) for document in documents], GAPS
        )
        output = module(batch, counts, make_ops(target, dtype))
        output.loss.backward()
        assert counts.item() == pytest.approx(result.denominator, rel=1e-12)
        assert output.counts["accuracy"].tolist() == result.counted
        assert abs(output.loss.item() - result.loss.item()) <= tolerance * result.loss.item()
        assert_gradients(gradients(module), expected, tolerance)
    return result


@pytest.fixture
def small_chunks(monkeypatch):
    """Several blocks to a chunk of attention, and several chunks; gradients summed over several chunks of logits."""
    monkeypatch.setattr("spec_kit.block_drafting.attention.CHUNK_BLOCKS", 4)
    monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", 0)


@pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
@pytest.mark.usefixtures("small_chunks")
def test_loss_and_every_gradient_equal_the_dense_reference(options, changes):
    target, config = make_target(**changes), make_config(**options)
    documents = random_documents(target, LENGTHS, 5, num_states(config))
    assert_equals_the_reference(target, config, documents)
    assert max(len(document.anchors) for document in documents) == 6


@pytest.mark.parametrize("kind", ["ce", "dpace", *SOFT])
@pytest.mark.usefixtures("small_chunks")
def test_guesses_that_were_judged_equal_the_dense_reference(kind):
    """Rounds of three guesses: blocks of three train two of them, blocks of six all three."""
    for block in (3, 6):
        target, config = make_target(), make_config(loss=kind, block_size=block, num_anchors=50)
        documents = random_documents(target, LENGTHS, 5, num_states(config))
        decode(documents, seed=block)
        for document in documents:
            document.anchors = [last for last in document.rounds if counted_slots(document, last, block)]
        result = assert_equals_the_reference(target, config, documents)
        assert [count > 0 for count in result.counted] == [slot < 3 for slot in range(block - 1)]


@pytest.mark.parametrize("seed", range(5))
def test_random_documents_and_layouts_equal_the_dense_reference(seed):
    draw = random.Random(seed)
    block = draw.randint(2, 9)
    config = make_config(
        loss=draw.choice(["ce", "dpace", *SOFT]),
        block_size=block,
        num_layers=3,
        layer_types=tuple(draw.choice([FULL, SLIDING]) for _ in range(3)),
        sliding_window=draw.randint(block, block + 6),
        num_anchors=draw.choice([1, 3, 50]),
    )
    target, lengths = make_target(), [draw.randint(1, 24) for _ in range(draw.randint(1, 5))]
    documents = random_documents(target, lengths, seed, num_states(config), torch.float64)
    documents[-1].mask[:] = draw.random() < 0.5
    module = make_model(target, config, torch.float64)
    batch = make_batch(documents, [draw.randint(0, 3) for _ in lengths], padding=draw.randint(0, 2))
    output = module(batch, denominators(config, documents), make_ops(target, torch.float64))
    output.loss.backward()
    result, expected = run_reference(module, documents, target)
    torch.testing.assert_close(output.loss.detach(), result.loss.detach(), rtol=1e-9, atol=1e-12)
    for name, grad in gradients(module).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["ce", "dpace", *SOFT])
def test_metrics_and_denominator_equal_the_dense_reference(kind):
    """Three tokens: guesses are right often enough for prefixes of every length."""
    target = make_target(vocab_size=3, eos_token_ids=(0,))
    config = make_config(loss=kind, num_anchors=40)
    documents = random_documents(target, [60, 45, 7], 3, num_states(config), torch.float64)
    module, counts = make_model(target, config, torch.float64), denominators(config, documents)
    output = module(make_batch(documents, [0, 1, 0]), counts, make_ops(target, torch.float64))
    result, _ = run_reference(module, documents, target)
    assert counts.dtype == torch.float64
    assert counts.item() == pytest.approx(result.denominator, rel=1e-12)
    assert output.counts["accuracy"].tolist() == result.counted
    assert {1, 2, 3} <= set(result.lengths)
    metrics = output.metrics()
    for name, sums in {"accuracy": result.correct, "slot_loss": result.slot_loss}.items():
        ratios = [total / count for total, count in zip(sums, result.counted, strict=True)]
        assert metrics[name] == pytest.approx(ratios, rel=1e-9), name
    assert metrics["acceptance_length"] == pytest.approx(sum(result.lengths) / len(result.lengths), rel=1e-12)


@pytest.mark.parametrize("kind", ["ce", "dpace", *SOFT])
@pytest.mark.parametrize(("num_ranks", "gap"), [(2, 6), (4, 0)])
def test_any_number_of_ranks_draws_the_same_anchors_and_takes_the_same_step(kind, num_ranks, gap):
    """Rank r trains every ``num_ranks``-th sample, sample ids kept; three of six have more anchors than are drawn."""
    target, config = make_target(), make_config(loss=kind, sliding_window=6, num_anchors=4)
    module = make_model(target, config, torch.float64)
    documents = random_documents(target, LENGTHS, 5, num_states(config), torch.float64)
    counts, ops = denominators(config, documents), make_ops(target, torch.float64)
    whole = module(make_batch(documents, GAPS), counts, ops)
    whole.loss.backward()
    expected = gradients(module)
    module.zero_grad()
    ids = list(range(len(documents)))[::-1]
    parts = [ids[rank::num_ranks] for rank in range(num_ranks)]
    shares = [
        module(make_batch([documents[i] for i in part], [gap] * len(part), ids=part), counts, ops)
        for part in parts
    ]
    total = sum(shares[1:], shares[0])
    total.loss.backward()
    torch.testing.assert_close(total.loss, whole.loss, rtol=1e-12, atol=0)
    assert_gradients(gradients(module), expected, 1e-12)
    for name, value in whole.sums.items():
        torch.testing.assert_close(total.sums[name].double(), value.double(), rtol=1e-12, atol=1e-12)
        assert torch.equal(total.counts[name], whole.counts[name])


@pytest.mark.parametrize("lengths", [[], [1], [2, 1], [9, 4]], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("kind", ["ce", "dpace", *SOFT])
def test_batch_without_anchors_gives_zero_loss_and_zero_gradients(lengths, padding, kind):
    """Every other token is supervised: there are labels, but no anchor has one behind it."""
    target, config = make_target(), make_config(loss=kind)
    module, documents = make_model(target, config), random_documents(target, lengths, 1, num_states(config))
    for document in documents:
        document.mask[:] = torch.arange(len(document.mask)) % 2 == 0
    batch = make_batch(documents, [0] * len(documents), padding=padding)
    if not documents:
        empty = torch.zeros(padding, num_states(config), 16)
        batch = make_batch([Document(batch.input_ids_T, empty, batch.loss_mask_T)], [0])
    for count in (0.0, 7.0):
        module.zero_grad()
        output = module(batch, torch.tensor([count], dtype=torch.float64), make_ops(target))
        output.loss.backward()
        assert output.loss.item() == 0
        assert output.metrics()["acceptance_length"] == 0
        assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def test_nothing_outside_a_blocks_document_and_past_reaches_it():
    """Features from the anchor on, other documents and padding may be anything."""
    target, config = make_target(), make_config(num_anchors=1)
    module, ops = make_model(target, config, torch.float64), make_ops(target, torch.float64)
    documents = random_documents(target, [12, 10, 11], 4, dtype=torch.float64)
    for document in documents:
        document.mask[:] = False
    documents[1].mask[4:7] = True
    counts, batch = denominators(config, documents), make_batch(documents, [2, 0, 1])
    give_anchors(config, documents)
    expected = module(batch, counts, ops).loss
    (anchor,) = documents[1].anchors
    other = batch.hidden_TNH.clone()
    other[14 + anchor :] = 1e3
    other[:14] = -1e3
    batch.hidden_TNH.copy_(other)
    assert torch.equal(module(batch, counts, ops).loss, expected)
    batch.hidden_TNH[14 + anchor - 1] += 1
    assert not torch.equal(module(batch, counts, ops).loss, expected)


def test_bfloat16_stays_close_to_float32():
    target, config = make_target(), make_config()
    module, documents = make_model(target, config), random_documents(target, [40, 30], seed=5)
    batch, counts = make_batch(documents, [0, 0]), denominators(config, documents)
    assert_bfloat16_is_close(module, batch, counts, lambda dtype: make_ops(target, dtype))


def test_evaluation_without_gradients_gives_the_same_numbers():
    target, config = make_target(), make_config()
    module, documents = make_model(target, config), random_documents(target, LENGTHS, seed=5)
    arguments = make_batch(documents, GAPS), denominators(config, documents), make_ops(target)
    assert_same_without_gradients(module, arguments)
