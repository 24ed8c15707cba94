"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

from __future__ import annotations

import pytest

from ..block_steps import BlockStepSuite
from ..draft_batches import LLAMA3
from ..draft_parts import gradients
from . import cases

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
    first_guess = 0
    measured = ({"markov_head": "vanilla"}, {"markov_head": "rnn"})

    @pytest.fixture(params=HEADS)
    def options(self, request):
        return {"markov_head": request.param}

    def random_options(self, draw, guesses):
        return {"markov_head": draw.choice(HEADS)}

    def expected_metrics(self, result):
        sums, numbers = super().expected_metrics(result)
        numbers["expected_length"] = sum(result.expected) / len(result.expected)
        return {**sums, "acceptance": result.overlap}, numbers

    @pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
    @pytest.mark.usefixtures("small_chunks")
    def test_loss_and_every_gradient_equal_the_dense_reference(self, options, changes):
        config, module = self.assert_case(options, changes)
        assert all(grad.any() or config.confidence_weight == 0 for grad in gradients(module).values())
