"""The same run in one process and in many: the same loss curve, every sample trained exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .launching import MAX_TOKENS, Lab, assert_trained_exactly_once, losses

if TYPE_CHECKING:
    from pathlib import Path

SHOWN = 50
"""Steps that are compared."""
SAMPLES = range(40)


@pytest.fixture(scope="module")
def inline(lab: Lab) -> list[float]:
    """Loss curve of one process."""
    output = lab.folder / "inline"
    lab.train(output, train__steps=SHOWN)
    assert_trained_exactly_once(output, SAMPLES)
    return losses(output)


def assert_same_curve(output: Path, curve: list[float]) -> None:
    steps = min(len(curve), len(losses(output)))
    assert losses(output)[:steps] == pytest.approx(curve[:steps], rel=1e-5)
    assert_trained_exactly_once(output, SAMPLES)


def test_the_loss_falls_by_a_third_in_the_steps_that_are_compared(inline: list[float]) -> None:
    assert len(inline) == SHOWN
    assert inline[-1] < 0.7 * inline[0]


def test_one_engine_and_two_trainers(inline: list[float], uninterrupted: Path) -> None:
    assert_same_curve(uninterrupted, inline)


def test_two_runs_of_one_host_at_once_and_no_second_one_in_a_directory(lab: Lab, inline: list[float]) -> None:
    small = lab.start(
        lab.folder / "one-one",
        placement__kind="colocated",
        train__steps=SHOWN,
        train__accumulation=4,
        data__packing="false",
    )
    large = lab.start(
        lab.folder / "two-two",
        placement__kind="disaggregated",
        train__steps=SHOWN,
        train__ranks=2,
        engine__replicas=2,
    )
    large.train_on(1)
    second = lab.start(large.output, placement__kind="disaggregated")
    assert second.wait(60) == 2
    assert (
        second.last_line()
        == f"spec-trainer: error: output {large.output} is in use by a run that is under way"
    )
    for run in (small, large):
        assert run.wait(150) == 0, run.story()
        assert_same_curve(run.output, inline)


def test_one_of_two_engines_ten_times_slower_and_a_window_of_two_samples(
    lab: Lab, inline: list[float]
) -> None:
    output = lab.folder / "slow"
    slow_one = lab.folder / "slow-one"
    lab.train(
        output,
        placement__kind="disaggregated",
        placement__window_bytes=2 * lab.sample_bytes(MAX_TOKENS),
        engine__name="moody",
        engine__replicas=2,
        engine__slow_one=slow_one,
        data__packing="false",
        train__steps=SHOWN,
    )
    assert slow_one.exists()
    assert_same_curve(output, inline)


def test_more_places_than_samples_and_samples_without_supervision(lab: Lab, inline: list[float]) -> None:
    """Eight micro-batches of a step share the two or three samples at the end of an epoch; samples that supervise
    nothing are trained like all others."""
    output = lab.folder / "unequal"
    lab.train(output, **lab.one_and_two, train__accumulation=4, train__steps=20)
    assert_same_curve(output, inline)


def test_plan_refuses_a_window_that_a_sample_does_not_fit(lab: Lab) -> None:
    window = lab.sample_bytes(MAX_TOKENS) - 1
    refused = lab.plan(placement__kind="disaggregated", placement__window_bytes=window)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert f"placement.window_bytes={window} is smaller than sample" in line
    assert f"raise it to {window + 1}" in line
