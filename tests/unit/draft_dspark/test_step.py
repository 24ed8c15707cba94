"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

from __future__ import annotations

import random

import pytest
import torch

from ..block_steps import GAPS, LENGTHS, BlockStepSuite, documents_of
from ..draft_dflash.cases import LLAMA3, decode
from ..draft_dflash.dense_reference import counted_slots
from ..draft_parts import gradients, make_target
from . import cases
from .cases import make_config, make_model
from .dense_reference import dense_dspark

CASES = {
    "vanilla": ({}, {}),
    "gated": ({"markov_head": "gated"}, {}),
    "rnn": ({"markov_head": "rnn"}, {}),
    "confidence of the state alone": ({"markov_head": "gated", "confidence_with_markov": False}, {}),
    "no confidence": ({"markov_head": "rnn", "confidence": False}, {}),
    "one guess": ({"block_size": 1, "markov_head": "rnn"}, {}),
    "seven guesses": ({"block_size": 7, "num_layers": 1, "markov_head": "rnn"}, {}),
    "blocks longer than documents": ({"block_size": 30, "num_layers": 1}, {}),
    "cross-entropy alone": ({"l1_weight": 0.0, "confidence_weight": 0.0}, {}),
    "distance alone": ({"ce_weight": 0.0, "confidence": False}, {}),
    "other weights": ({"ce_weight": 0.7, "l1_weight": 0.2, "confidence_weight": 3.0, "gamma": 1.3}, {}),
    "llama3 rope": ({}, {"rope": LLAMA3}),
    "scaled embedding": ({}, {"embedding_scale": 3.0}),
}


HEADS = ["vanilla", "gated", "rnn"]


class TestDSparkStep(BlockStepSuite):
    cases = cases
    dense = staticmethod(dense_dspark)

    @pytest.fixture(params=HEADS)
    def options(self, request):
        return {"markov_head": request.param}

    @pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
    @pytest.mark.usefixtures("small_chunks")
    def test_loss_and_every_gradient_equal_the_dense_reference(self, options, changes):
        target, config = make_target(**changes), make_config(**options)
        documents = documents_of(target, LENGTHS, 5, torch.float32)
        reference = self.run_reference(make_model(target, config), documents, target)
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
            module = make_model(target, config, dtype)
            step = self.assert_equals_the_reference(
                module, documents, target, (GAPS, 0), tolerance, reference
            )
            assert step[0].loss.item() > 0.1
            assert all(grad.any() or config.confidence_weight == 0 for grad in gradients(module).values())

    @pytest.mark.parametrize("seed", range(4))
    def test_random_documents_and_layouts_equal_the_dense_reference(self, seed):
        draw = random.Random(seed)
        config = make_config(
            block_size=draw.randint(1, 6), num_anchors=draw.choice([1, 3, 50]), markov_head=draw.choice(HEADS)
        )
        target, lengths = make_target(), [draw.randint(1, 24) for _ in range(draw.randint(1, 5))]
        documents = documents_of(target, lengths, seed)
        documents[-1].mask[:] = draw.random() < 0.5
        layout = [draw.randint(0, 3) for _ in lengths], draw.randint(0, 2)
        self.assert_equals_the_reference(make_model(target, config, torch.float64), documents, target, layout)

    def test_guesses_that_were_judged_equal_the_dense_reference(self, options):
        """Rounds of three guesses: blocks of two train two of them, blocks of five all three."""
        for guesses in (2, 5):
            config = make_config(**options, block_size=guesses, num_anchors=50)
            target = make_target()
            documents = documents_of(target, LENGTHS, 5)
            decode(documents, seed=guesses)
            for document in documents:
                document.anchors = [
                    last for last in document.rounds if counted_slots(document, last, guesses + 1)
                ]
            module = make_model(target, config, torch.float64)
            _, result = self.assert_equals_the_reference(module, documents, target, (GAPS, 0))
            assert [count > 0 for count in result.counted] == [place < 3 for place in range(guesses)]

    def test_metrics_equal_the_dense_reference(self, options):
        """Three tokens: guesses are right often enough for prefixes of every length."""
        target, config = (
            make_target(vocab_size=3, eos_token_ids=(0,)),
            make_config(**options, num_anchors=40),
        )
        documents = documents_of(target, [60, 45, 7], 3)
        module = make_model(target, config, torch.float64)
        output, result = self.assert_equals_the_reference(module, documents, target, ([0, 1, 0], 0))
        assert {1, 2, 3} <= set(result.lengths)
        metrics = output.metrics()
        for name, sums in {"accuracy": result.correct, "acceptance": result.overlap}.items():
            ratios = [total / count for total, count in zip(sums, result.counted, strict=True)]
            assert metrics[name] == pytest.approx(ratios, rel=1e-9), name
        for name, lengths in {
            "acceptance_length": result.lengths,
            "expected_length": result.expected,
        }.items():
            assert metrics[name] == pytest.approx(sum(lengths) / len(lengths), rel=1e-12), name
