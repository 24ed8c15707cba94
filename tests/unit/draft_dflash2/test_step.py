"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

from typing import ClassVar

import pytest

from ..block_steps import BlockStepSuite
from ..draft_batches import LLAMA3
from ..draft_parts import gradients
from . import cases

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
    "sliding, looking both ways": ({"sliding_window": 5}, {}),
    "reduced vocabulary": ({"vocab_size": 11, "ce_weight": 0.6, "soft_weight": 0.7}, {}),
    "llama3 rope": ({}, {"rope": LLAMA3}),
    "opd, nothing judged": ({"opd": True}, {}),
    "scaled embedding": ({}, {"embedding_scale": 3.0}),
}


class TestDFlash2Step(BlockStepSuite):
    cases = cases
    distilled = (
        {},
        {"ce_weight": 0.7, "soft_weight": 0.2, "selector_weight": 3.0, "gamma": 1.3},
        {"selector_top_k": 29},
        {"vocab_size": 17, "ce_weight": 0.6},
    )
    of_few_tokens: ClassVar[dict[str, object]] = {**BlockStepSuite.of_few_tokens, "selector_top_k": 2}

    def expected_metrics(self, result):
        assert result.correct != result.head_correct
        sums, numbers = super().expected_metrics(result)
        numbers["acceptance_length_t1"] = sum(result.lengths_t1) / len(result.lengths_t1)
        own = {"head_accuracy": result.head_correct, "recall": result.recalled}
        return {**sums, **own, "acceptance_t1": result.chance}, numbers

    @pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
    @pytest.mark.usefixtures("small_chunks")
    def test_loss_and_every_gradient_equal_the_dense_reference(self, options, changes):
        config, module = self.assert_case(options, changes)
        untrained = {"candidate_selector"} if config.selector_top_k == 1 else set()
        for name, grad in gradients(module).items():
            assert grad.any() or name.partition(".")[0] in untrained
