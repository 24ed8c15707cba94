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


class TestDFlash2Step(BlockStepSuite):
    cases = cases
    dense = staticmethod(dense_dflash2)

    @pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
    @pytest.mark.usefixtures("small_chunks")
    def test_loss_and_every_gradient_equal_the_dense_reference(self, options, changes):
        target, config = make_target(**changes), make_config(**options)
        documents = documents_of(target, LENGTHS, 5, torch.float32)
        reference = self.run_reference(make_model(target, config), documents, target)
        untrained = {"candidate_selector"} if config.selector_top_k == 1 else set()
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
            module = make_model(target, config, dtype)
            step = self.assert_equals_the_reference(
                module, documents, target, (GAPS, 0), tolerance, reference
            )
            assert step[0].loss.item() > 0.1
            for name, grad in gradients(module).items():
                assert grad.any() or name.partition(".")[0] in untrained

    @pytest.mark.parametrize("seed", range(4))
    def test_random_documents_and_layouts_equal_the_dense_reference(self, seed):
        draw = random.Random(seed)
        config = make_config(block_size=draw.randint(2, 7), num_anchors=draw.choice([1, 3, 50]))
        target, lengths = make_target(), [draw.randint(1, 24) for _ in range(draw.randint(1, 5))]
        documents = documents_of(target, lengths, seed)
        documents[-1].mask[:] = draw.random() < 0.5
        layout = [draw.randint(0, 3) for _ in lengths], draw.randint(0, 2)
        self.assert_equals_the_reference(make_model(target, config, torch.float64), documents, target, layout)

    def test_guesses_that_were_judged_equal_the_dense_reference(self):
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
            _, result = self.assert_equals_the_reference(module, documents, target, (GAPS, 0))
            assert [count > 0 for count in result.counted] == [place < 3 for place in range(guesses)]

    def test_metrics_equal_the_dense_reference(self):
        """Three tokens: guesses are right often enough for prefixes of every length."""
        target, config = (
            make_target(vocab_size=3, eos_token_ids=(0,)),
            make_config(num_anchors=40, selector_top_k=2),
        )
        documents = documents_of(target, [60, 45, 7], 3)
        module = make_model(target, config, torch.float64)
        output, result = self.assert_equals_the_reference(module, documents, target, ([0, 1, 0], 0))
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
