"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

import pytest
import torch

from ..block_steps import BlockStepSuite
from ..draft_batches import LLAMA3, random_documents, step_arguments
from ..draft_parts import gradients, make_ops, make_target
from . import cases

CASES = {
    "vanilla": ({}, {}),
    "gated": ({"markov_head": "gated"}, {}),
    "rnn": ({"markov_head": "rnn"}, {}),
    "confidence of the state alone": ({"markov_head": "gated", "confidence_with_markov": False}, {}),
    "no confidence": ({"markov_head": "rnn", "confidence": False}, {}),
    "one guess": ({"block_size": 1, "markov_head": "rnn"}, {}),
    "seven guesses": ({"block_size": 7, "num_layers": 1, "markov_head": "rnn"}, {}),
    "a first slot without a guess": ({"sample_from_anchor": False, "markov_head": "rnn"}, {}),
    "sliding": ({"sliding_window": 6, "markov_head": "gated"}, {}),
    "blocks longer than documents": ({"block_size": 30, "num_layers": 1}, {}),
    "cross-entropy alone": ({"l1_weight": 0.0, "confidence_weight": 0.0}, {}),
    "distance alone": ({"ce_weight": 0.0, "confidence": False}, {}),
    "other weights": ({"ce_weight": 0.7, "l1_weight": 0.2, "confidence_weight": 3.0, "gamma": 1.3}, {}),
    "llama3 rope": ({}, {"rope": LLAMA3}),
    "reduced": ({"vocab_size": 11}, {}),
    "reduced, rnn, cross-entropy alone": (
        {"vocab_size": 17, "markov_head": "rnn", "l1_weight": 0.0, "confidence_weight": 0.0},
        {},
    ),
    "reduced, gated, distance alone": ({"vocab_size": 17, "markov_head": "gated", "ce_weight": 0.0}, {}),
    "opd, nothing judged": ({"opd": True}, {}),
    "scaled embedding": ({}, {"embedding_scale": 3.0}),
}
HEADS = ["vanilla", "gated", "rnn"]


class TestDSparkStep(BlockStepSuite):
    cases = cases
    first_guess = 0
    distilled = (
        {},
        {"markov_head": "rnn", "confidence": False, "vocab_size": 17},
        {"markov_head": "gated", "sample_from_anchor": True, "gamma": 1.3, "confidence_weight": 2.0},
    )
    measured = ({"markov_head": "vanilla"}, {"markov_head": "rnn"}, {"vocab_size": 500})

    @pytest.fixture(params=HEADS)
    def options(self, request):
        return {"markov_head": request.param}

    def random_options(self, draw, guesses):
        return {"markov_head": draw.choice(HEADS), "vocab_size": draw.choice([None, 5, 20])}

    def expected_metrics(self, result):
        sums, numbers = super().expected_metrics(result)
        numbers["expected_length"] = sum(result.expected) / len(result.expected)
        numbers["acceptance_length_t1"] = sum(result.lengths_t1) / len(result.lengths_t1)
        return {**sums, "acceptance": result.overlap, "acceptance_t1": result.chance}, numbers

    def test_metrics_of_a_reduced_vocabulary_equal_the_dense_reference(self):
        """A guess of a token without a row is never right, nor is it accepted."""
        self.assert_metrics({"vocab_size": 2})

    @pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
    @pytest.mark.usefixtures("small_chunks")
    def test_loss_and_every_gradient_equal_the_dense_reference(self, options, changes):
        config, module = self.assert_case(options, changes)
        assert all(grad.any() or config.confidence_weight == 0 for grad in gradients(module).values())


def test_gradients_in_bfloat16_do_not_depend_on_the_number_of_chunks(monkeypatch):
    """Sums over chunks would lose small summands in bfloat16."""
    target, config, dtype = make_target(), cases.make_config(num_anchors=512, num_layers=1), torch.bfloat16
    (document,) = random_documents(target, [300], 1, 6, dtype)
    results = []
    for num_bytes in (0, 1 << 24):
        monkeypatch.setattr("spec_core.ops.CHUNK_BYTES", num_bytes)
        module = cases.make_model(target, config, dtype)
        batch, counts, _ = step_arguments(cases.Draft(config), target, [document])
        module(batch, counts, make_ops(target, dtype)).loss.backward()
        results.append(gradients(module))
    for name, grad in results[1].items():
        assert (results[0][name] - grad).abs().max() <= 0.005 * grad.abs().max(), name
