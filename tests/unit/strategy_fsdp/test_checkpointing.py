"""Activations that are computed again, on two ranks: the same run to the bit, resumed with and without them."""

import pytest

from spec_strategy_fsdp.strategy import FsdpStrategy

from ..strategy_megatron.training import DRAFTS, HEADS, LIMIT_S, Run, train

AGAIN = {"checkpoint_activations": True}
STEPS = 2


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param([("eagle3", "float32"), ("dflash", "bfloat16")], id="two"),
        # Of each draft, its own tests compare what is computed again.
        pytest.param(
            [
                *((draft, "float32") for draft in [*DRAFTS, *HEADS] if draft != "eagle3"),
                ("eagle3", "bfloat16"),
            ],
            id="others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_draft_trains_as_without(tmp_path, ways):
    whole, again = (
        [Run(FsdpStrategy, draft, dtype=dtype, steps=STEPS, draft_options=options) for draft, dtype in ways]
        for options in ({}, AGAIN)
    )
    longer = Run(FsdpStrategy, "eagle3", steps=2 * STEPS)
    saved = Run(FsdpStrategy, "eagle3", steps=STEPS, draft_options=AGAIN, save_to=tmp_path / "half")
    resumed = [
        Run(FsdpStrategy, "eagle3", steps=STEPS, draft_options=options, resume_from=tmp_path / "half")
        for options in ({}, AGAIN)
    ]
    runs = [*whole, *again, longer, saved, *resumed]
    results = dict(zip(map(id, runs), train(2, tmp_path / "two", *runs), strict=True))
    for one, other in zip(whole, again, strict=True):
        assert results[id(other)] == results[id(one)], one.draft
    for run in resumed:
        got, expected = results[id(run)], results[id(longer)]
        assert (got.losses, got.weights) == (expected.losses[STEPS:], expected.weights)
