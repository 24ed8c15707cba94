"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

from typing import ClassVar

import pytest

from spec_draft_dflash2.lilicorr.draft import LiLiCorrDraft

from ..block_steps import BlockStepSuite, one_block
from ..draft_batches import LLAMA3, denominators
from ..draft_parts import gradients, make_target
from . import cases

PLAIN = {"conv_kernel_size": 0, "conv_group_size": None}
EVERY = {"lilicorr_candidate_topk": 16}
CASES = {
    "as in the paper": ({}, {}),
    "without convolutions": (PLAIN, {}),
    "most tokens are candidates": (EVERY, {}),
    "every part of the loss": (
        {**EVERY, "soft_weight": 0.3, "ce_weight": 0.7, "margin_weight": 0.5, "margin": 1.5, "gamma": 1.3},
        {},
    ),
    "the penalty alone": ({**EVERY, "path_weight": 0.0, "penalty_weight": 1.0}, {}),
    "as wide as the draft": ({"lilicorr_hidden_size": 16, "lilicorr_num_heads": 2, **EVERY}, {}),
    "one candidate": ({"lilicorr_candidate_topk": 1, "lilicorr_num_layers": 1}, {}),
    "blocks longer than documents": ({"block_size": 12, "num_layers": 1, **EVERY}, {}),
    "opd, nothing judged": ({"opd": True}, {}),
    "llama3 rope": ({}, {"rope": LLAMA3}),
}


class TestLiLiCorrStep(BlockStepSuite):
    cases = cases
    distilled = (PLAIN, EVERY, {**EVERY, "soft_weight": 0.3, "margin_weight": 0.5, "gamma": 1.3})
    of_few_tokens: ClassVar[dict[str, object]] = {
        **BlockStepSuite.of_few_tokens,
        "lilicorr_candidate_topk": 2,
        "margin_weight": 0.5,
    }

    def expected_metrics(self, result):
        assert result.correct != result.head_correct
        sums, numbers = super().expected_metrics(result)
        numbers["acceptance_length_t1"] = sum(result.lengths_t1) / len(result.lengths_t1)
        own = {"head_accuracy": result.head_correct, "recall": result.recalled, "path_loss": result.path_loss}
        return {**sums, **own, "acceptance_t1": result.chance}, numbers

    @pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
    @pytest.mark.usefixtures("small_chunks")
    def test_loss_and_every_gradient_equal_the_dense_reference(self, options, changes):
        config, module = self.assert_case(options, changes)
        if config.lilicorr_candidate_topk > 4 and config.block_size > 2:
            assert all(grad.any() for grad in gradients(module).values())


def test_the_paths_loss_is_divided_by_the_number_of_guesses():
    """Model-Optimizer divides by the guesses that have such a loss, whose number depends on the draft's weights."""
    document = one_block([2, 3, 4])  # anchor 2 has two guesses, anchor 3 one
    assert denominators(LiLiCorrDraft(cases.make_config()), [document])[1].item() == 3


def test_the_path_heads_own_parameters_are_no_hidden_matrices():
    """An optimizer for hidden matrices leaves biases of attention to another."""
    hints = LiLiCorrDraft(cases.make_config()).shard_hints(make_target())
    assert hints.is_vocabulary("lilicorr.relative_slot_bias")
    assert not hints.is_vocabulary("lilicorr.token_proj.weight")
    assert not hints.is_vocabulary("lilicorr.layers.0.attn.in_proj_weight")
