"""Loss, every gradient and the metrics of a step against the dense float64 reference."""

import pytest
import torch

from ..block_steps import BlockStepSuite
from ..draft_batches import LLAMA3, YARN, random_documents
from ..draft_parts import make_target
from . import cases
from .dense_reference import SOFT

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
    "reduced": ({"vocab_size": 11}, {}),
    "reduced, d-pace": ({"vocab_size": 17, "loss": "dpace"}, {}),
    "reduced, soft": ({"vocab_size": 11, "loss": "soft"}, {}),
    "reduced, lk_alpha": ({"vocab_size": 17, "loss": "lk_alpha", "sliding_window": 6}, {}),
    "reduced, lk_lambda": ({"vocab_size": 17, "loss": "lk_lambda"}, {}),
    "opd, nothing judged": ({"opd": True}, {}),
    "one key head": ({}, {"num_kv_heads": 1, "num_layers": 36}),
}
KINDS = ["ce", "dpace", *SOFT]


class TestDFlashStep(BlockStepSuite):
    cases = cases
    # A loss that compares with labels, and the loss on distributions that has the most parts.
    measured = ({"loss": "dpace"}, {"loss": "lk_lambda"}, {"loss": "soft", "vocab_size": 500})
    checkpointed = ({}, {"sliding_window": 6}, {"loss": "soft", "num_features": 3})
    distilled = (
        {},
        {"vocab_size": 17},
        {"loss": "soft", "vocab_size": 17, "gamma": 1.3},
        {"loss": "lk_alpha"},
        {"loss": "lk_lambda"},
    )

    @pytest.fixture(params=["ce", "dpace", "soft", "lk_lambda"])
    def options(self, request):
        return {"loss": request.param, "sliding_window": 6}

    def documents(self, config, lengths, seed, dtype=torch.float64, **changes):
        """Have the input of the final norm where the loss compares distributions."""
        num_states = (len(config.layers or ()) or config.num_features or 5) + (
            config.loss in SOFT or config.opd
        )
        return random_documents(make_target(**changes), lengths, seed, num_states, dtype)

    def random_options(self, draw, guesses):
        return {
            "loss": draw.choice(KINDS),
            "vocab_size": draw.choice([None, 5, 20]),
            "num_layers": 3,
            "layer_types": tuple(draw.choice([FULL, SLIDING]) for _ in range(3)),
            "sliding_window": draw.randint(guesses + 1, guesses + 7),
        }

    def expected_metrics(self, result):
        sums, numbers = super().expected_metrics(result)
        return {**sums, "slot_loss": result.slot_loss}, numbers

    @pytest.mark.parametrize("kind", ["ce", "soft"])
    def test_metrics_of_a_reduced_vocabulary_equal_the_dense_reference(self, kind):
        """A guess of a token without a row is never right."""
        self.assert_metrics({"loss": kind, "vocab_size": 2})

    @pytest.mark.parametrize(("options", "changes"), CASES.values(), ids=CASES.keys())
    @pytest.mark.usefixtures("small_chunks")
    def test_loss_and_every_gradient_equal_the_dense_reference(self, options, changes):
        self.assert_case(options, changes)
