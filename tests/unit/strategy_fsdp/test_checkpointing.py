"""Activations that are computed again, on two ranks: the same run to the bit, resumed with and without them."""

from __future__ import annotations

import pytest

from spec_strategy_fsdp.strategy import FsdpStrategy

from ..strategy_megatron.training import DRAFTS, LIMIT_S, Run, train

AGAIN = {"checkpoint_activations": True}
STEPS = 3


@pytest.mark.timeout(2 * LIMIT_S)
def test_every_draft_trains_as_without(tmp_path):
    whole = [Run(FsdpStrategy, draft, steps=STEPS) for draft in DRAFTS]
    again = [Run(FsdpStrategy, draft, steps=STEPS, draft_options=AGAIN) for draft in DRAFTS]
    ways = [
        Run(FsdpStrategy, draft, dtype=dtype, steps=STEPS, draft_options=options)
        for draft, dtype in (("eagle3", "bfloat16"), ("dflash", "bfloat16"))
        for options in ({}, AGAIN)
    ]
    longer = Run(FsdpStrategy, "eagle3", steps=2 * STEPS)
    saved = Run(FsdpStrategy, "eagle3", steps=STEPS, draft_options=AGAIN, save_to=tmp_path / "half")
    resumed = [
        Run(FsdpStrategy, "eagle3", steps=STEPS, draft_options=options, resume_from=tmp_path / "half")
        for options in ({}, AGAIN)
    ]
    runs = [*whole, *again, *ways, longer, saved, *resumed]
    results = dict(zip(map(id, runs), train(2, tmp_path / "two", *runs), strict=True))
    pairs = [*zip(whole, again, strict=True), *zip(ways[::2], ways[1::2], strict=True)]
    for one, other in pairs:
        assert results[id(other)] == results[id(one)], one.draft
    for run in resumed:
        got, expected = results[id(run)], results[id(longer)]
        assert (got.losses, got.weights) == (expected.losses[STEPS:], expected.weights)
