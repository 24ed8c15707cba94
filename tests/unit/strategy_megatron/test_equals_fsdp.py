"""Divided over any mesh, with any draft, a run under megatron is the run under fsdp; so is one that changes over."""

import os
from itertools import chain, product

import pytest

from spec_strategy_fsdp.strategy import FsdpStrategy

from ..strategy_fsdp.same_training import TOLERANCE, assert_same_weights
from .training import DRAFTS, LIMIT_S, STRANGERS, Result, Run, train

MegatronStrategy = pytest.importorskip("spec_strategy_megatron.strategy").MegatronStrategy
if not MegatronStrategy.probe().ok:
    pytest.skip(MegatronStrategy.probe().reason, allow_module_level=True)

DIVIDED = {"tensor_parallel": 2}
DISTRIBUTED = {"distributed_optimizer": True}
SEQUENCE = DIVIDED | {"sequence_parallel": True}
EVERY = [one | other for one in ({}, DIVIDED, SEQUENCE) for other in ({}, DISTRIBUTED)]
ALL = "SPEC_TEST_ALL_OF_MEGATRON" in os.environ
"""Whether every draft is trained for 50 steps in every way, as ``make test-megatron`` does."""
LONG, STEPS = (tuple(DRAFTS), 50) if ALL else (("eagle3", "dflash"), 15)
SHORT = 4
"""Steps where a few say as much as many: a wrong state shows in the first of them."""


def assert_same(got: Result, expected: Result) -> None:
    """Losses are equal, and weights as vectors, but for rounding; of the reference its last steps count."""
    assert got.losses == pytest.approx(expected.losses[-len(got.losses) :], rel=TOLERANCE)
    assert got.evaluated == pytest.approx(expected.evaluated, rel=TOLERANCE)
    assert got.metrics["acceptance_length"] == pytest.approx(expected.metrics["acceptance_length"])
    assert_same_weights(got.weights, expected.weights)


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_any_mesh_and_any_change_of_strategy(tmp_path):
    """Many steps on two ranks; what one strategy saved on one mesh, another loads on another; four ranks, too.

    Each call of ``train`` imports Megatron-Core once for each rank, which takes longer than its runs.
    """
    whole = [Run(FsdpStrategy, draft, steps=STEPS) for draft in LONG]
    whole += [Run(FsdpStrategy, draft, steps=2 * SHORT) for draft in DRAFTS]
    ways = EVERY if ALL else [{}, DIVIDED]
    divided = [Run(MegatronStrategy, draft, options, steps=STEPS) for draft in LONG for options in ways]
    divided += [
        Run(MegatronStrategy, draft, options, steps=2 * SHORT)
        for draft in DRAFTS
        for options in (SEQUENCE, DISTRIBUTED)
    ]
    divided += [Run(MegatronStrategy, "eagle3", DIVIDED, steps=2 * SHORT, is_forced=True)]
    muon = {"optimizer": "muon"}
    whole += [Run(FsdpStrategy, "eagle3", steps=2 * SHORT, **muon)]
    divided += [
        Run(MegatronStrategy, "eagle3", options, steps=2 * SHORT, **muon)
        for options in (DIVIDED, DISTRIBUTED, DIVIDED | DISTRIBUTED)
    ]
    strangers = [Run(FsdpStrategy, draft) for draft in STRANGERS] if ALL else []
    whole += strangers
    divided += [
        Run(MegatronStrategy, run.draft, way) for run in strangers for way in ({}, DISTRIBUTED, DIVIDED)
    ]
    halves = {
        "fsdp": (FsdpStrategy, {}),
        "data": (MegatronStrategy, {}),
        "tensor": (MegatronStrategy, DIVIDED),
        "distributed": (MegatronStrategy, DISTRIBUTED),
    }
    saved = [
        Run(strategy, "eagle3", options, steps=SHORT, save_to=tmp_path / name)
        for name, (strategy, options) in halves.items()
    ]
    resumed = [
        Run(strategy, "eagle3", options, steps=SHORT, resume_from=tmp_path / state)
        for state, (name, (strategy, options)) in product(halves, halves.items())
        if state != name
    ]
    saved += [Run(FsdpStrategy, "eagle3", steps=SHORT, save_to=tmp_path / "muon", **muon)]
    resumed += [
        Run(MegatronStrategy, "eagle3", options, steps=SHORT, resume_from=tmp_path / "muon", **muon)
        for options in (DIVIDED, DISTRIBUTED)
    ]
    exact = [
        (
            Run(MegatronStrategy, "dflash", options, "bfloat16", steps=2 * SHORT),
            Run(MegatronStrategy, "dflash", options, "bfloat16", steps=SHORT, save_to=tmp_path / name),
            Run(MegatronStrategy, "dflash", options, "bfloat16", steps=SHORT, resume_from=tmp_path / name),
        )
        for name, options in (("half", DIVIDED), ("half-distributed", DISTRIBUTED))
    ]
    exported = [
        Run(strategy, "eagle3", options, dtype, steps=0, resume_from=tmp_path / "fsdp")
        for strategy, options in (*halves.values(), (MegatronStrategy, SEQUENCE | DISTRIBUTED))
        for dtype in ("float32", "bfloat16")
    ]
    runs = [*whole, *divided, *saved, *resumed, *chain.from_iterable(exact), *exported]
    results = dict(zip(map(id, runs), train(2, tmp_path / "two", *runs), strict=True))
    references = {(run.optimizer, run.draft, run.steps): results[id(run)] for run in whole}
    for run in divided:
        assert_same(results[id(run)], references[run.optimizer, run.draft, run.steps])
    for run in resumed:
        assert_same(results[id(run)], references[run.optimizer, run.draft, 2 * SHORT])
    for way in exact:
        went_on, _, again = (results[id(run)] for run in way)
        assert (again.losses, again.weights) == (went_on.losses[SHORT:], went_on.weights)  # to the bit
    same = [results[id(run)] for run in exported]
    assert all((one.exported, one.pushed) == (same[0].exported, same[0].pushed) for one in same)  # to the bit
    both = SEQUENCE | DISTRIBUTED
    ways = [DIVIDED, SEQUENCE, DIVIDED | DISTRIBUTED, both] if ALL else [both]
    four = [Run(MegatronStrategy, draft, options, steps=2 * SHORT) for draft in DRAFTS for options in ways]
    four += [Run(MegatronStrategy, draft, both) for draft in DRAFTS] if ALL else []
    four += [Run(MegatronStrategy, run.draft, DIVIDED) for run in strangers]
    four += [Run(MegatronStrategy, "eagle3 whole", DIVIDED, steps=2 * SHORT)]
    four += [Run(MegatronStrategy, "eagle3", DIVIDED | DISTRIBUTED, steps=2 * SHORT, **muon)]
    four += [
        Run(MegatronStrategy, "eagle3", both, steps=SHORT, resume_from=tmp_path / name) for name in halves
    ]
    four += [Run(MegatronStrategy, "eagle3", both, steps=SHORT, save_to=tmp_path / "both")] if ALL else []
    for run, result in zip(four, train(4, tmp_path / "four", *four), strict=True):
        if run.save_to is None:
            steps = run.steps if run.resume_from is None else 2 * SHORT
            assert_same(result, references[run.optimizer, run.draft, steps])
    if ALL:
        back = [(FsdpStrategy, {}), *((MegatronStrategy, way) for way in EVERY)]
        goes_on_from(tmp_path, ("both",), back, references["adamw", "eagle3", 2 * SHORT], ranks=2)
        alone = [(FsdpStrategy, {}), (MegatronStrategy, {}), (MegatronStrategy, DISTRIBUTED)]
        goes_on_from(tmp_path, (*halves, "both"), alone, references["adamw", "eagle3", 2 * SHORT], ranks=1)


def goes_on_from(folder, states, ways, expected, ranks):
    """On so many ranks, each way goes on from each state."""
    runs = [
        Run(strategy, "eagle3", options, steps=SHORT, resume_from=folder / state)
        for state, (strategy, options) in product(states, ways)
    ]
    for result in train(ranks, folder / f"again-{ranks}", *runs):
        assert_same(result, expected)
