"""A sweep over loads and numbers of draft tokens: what is fastest where, and from which load on."""

import json

import pytest

from spec_core.records import Generation
from spec_trainer.measure.evaluation.sweep import Sweep, sweep_lines
from spec_trainer.workers.passes import Pass

LOADS = (1, 4, 16)


def one(tokens_per_s: float, seconds: float = 2.0) -> Pass:
    return Pass(answers=[Generation(token_ids=(1,) * round(tokens_per_s * seconds))], seconds=seconds)


def sweep(speedups: dict[int, tuple[float, ...]], loads=LOADS) -> Sweep:
    """Return a sweep with these speed-ups; without a draft the n-th load has 100 n tokens/s."""
    plain = {size: one(100 * (place + 1)) for place, size in enumerate(loads)}
    return Sweep(
        plain=plain,
        drafted={
            number: {
                size: one(speedup * plain[size].tokens_per_s)
                for size, speedup in zip(loads, row, strict=True)
            }
            for number, row in speedups.items()
        },
    )


def test_each_load_counts_the_same_for_the_best_fixed_number():
    """The number 2 would be the best by the tokens of all loads together, of which the last load has half."""
    assert sweep({2: (1.2, 1.2, 1.2), 5: (2.0, 1.2, 0.6)}).best_fixed == 5


@pytest.mark.parametrize(
    ("speedups", "steps"),
    [
        ({3: (2.0, 1.5, 1.2)}, {1: 3}),
        ({3: (0.9, 0.8, 0.7)}, {1: 0}),
        ({3: (1.5, 1.5, 0.49)}, {1: 3, 8: 0}),  # just before half way by the logarithm
        ({5: (2.0, 1.0, 0.5), 2: (1.5, 1.5, 1.5)}, {1: 5, 3: 2}),
        ({5: (2.0, 1.0, 0.5), 2: (1.5, 1.5, 0.9)}, {1: 5, 3: 2, 13: 0}),
        ({1: (1.0, 1.1, 1.2)}, {1: 0, 2: 1}),  # as fast as no draft is no reason for a draft
    ],
)
def test_the_number_changes_where_another_one_becomes_the_faster(speedups, steps):
    assert sweep(speedups).draft_tokens_by_load() == steps


def test_loads_may_be_named_in_any_order():
    assert sweep({3: (0.49, 1.5, 1.5)}, loads=(16, 1, 4)).draft_tokens_by_load() == {1: 3, 8: 0}


def test_neighbouring_loads_leave_no_load_between():
    assert sweep({3: (1.5, 0.5)}, loads=(1, 2)).draft_tokens_by_load() == {1: 3, 2: 0}


def test_the_gain_is_over_the_best_single_choice():
    figures = sweep({5: (2.0, 1.0, 0.5), 2: (1.5, 1.5, 0.9)}).describe()
    assert (figures["best_fixed"], figures["mean_speedup_fixed"]) == (2, pytest.approx(1.3))
    assert figures["mean_speedup_by_load"] == pytest.approx(1.5)
    assert figures["gain"] == pytest.approx(1.5 / 1.3 - 1)
    slow = sweep({2: (1.2, 0.9, 0.3)}).describe()
    assert (slow["best_fixed"], slow["mean_speedup_fixed"]) == (0, 1.0), "no draft is a choice, too"
    assert slow["gain"] == pytest.approx(0.2 / 3)


def test_lines_of_a_sweep():
    swept = sweep({5: (2.0, 1.0, 0.5), 2: (1.5, 1.5, 0.9)}).describe()
    document = json.loads(json.dumps({"sweep": swept, "engine": "vllm", "not_by_load": {"a": "it is old"}}))
    assert [line.split() for line in list(sweep_lines(document))[:4]] == [
        ["at", "once", "without", "x", "with", "2", "x", "with", "5", "fastest"],
        ["1", "100.0", "1.50", "2.00", "5"],
        ["4", "200.0", "1.50", "1.00", "2"],
        ["16", "300.0", "0.90", "0.50", "no", "draft"],
    ]
    assert list(sweep_lines(document))[4:] == [
        "draft tokens by load: 5 from 1 at once, 2 from 3 at once, none from 13 at once",
        "mean speed-up over the loads: 1.50 by load, 1.30 with 2 draft tokens for all: a gain of 15 %, measured "
        "with engine vllm",
        "a is served with one number for all loads: it is old",
    ]
    assert list(sweep_lines({"sweep": None})) == []


def test_passes_that_are_too_short_are_warned_of_once():
    short = Sweep(plain={1: one(9)}, drafted={1: {1: one(100, seconds=0.5)}, 2: {1: one(200, seconds=0.5)}})
    (warning,) = short.warnings()  # the passes with 2 are the document's own
    assert warning.startswith("concurrency 1, 1 draft token: a pass took 0.50 s")
