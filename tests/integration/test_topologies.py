"""The same run in one process and in many: the same loss curve, every sample trained exactly once."""

import re
from datetime import datetime
from pathlib import Path

import pytest

from .launching import MAX_TOKENS, Lab, Run
from .run_directory import assert_trained_exactly_once, losses

SHOWN = 15
"""Steps that are compared."""
LONG = 50
"""Steps of a run beside which another one starts."""
SAMPLES = range(40)


@pytest.fixture(scope="module")
def inline(lab: Lab) -> list[float]:
    """Loss curve of one process."""
    output = lab.folder / "inline"
    lab.train_here(output, train__steps=SHOWN)
    assert_trained_exactly_once(output, SAMPLES)
    return losses(output)


def assert_same_curve(output: Path, curve: list[float]) -> None:
    steps = min(len(curve), len(losses(output)))
    assert losses(output)[:steps] == pytest.approx(curve[:steps], rel=1e-5)
    assert_trained_exactly_once(output, SAMPLES)


def test_the_loss_falls_in_the_steps_that_are_compared(inline) -> None:
    assert len(inline) == SHOWN
    assert inline[-1] < 0.9 * inline[0]


@pytest.mark.slow
def test_one_engine_and_two_trainers(lab, inline) -> None:
    run = lab.train(lab.folder / "one-two", **lab.one_and_two, train__steps=SHOWN)
    assert_same_curve(run.output, inline)


@pytest.fixture(scope="module")
def two_and_two(lab: Lab) -> Run:
    """Two engines, one of them ten times slower than it could be, and two trainers, with room for two samples on the
    way to each; all on a device whose memory is limited. It is under way."""
    run = lab.start(
        lab.folder / "two-two",
        backend__name="limited",
        placement__kind="colocated",
        placement__window_bytes=2 * lab.sample_bytes(MAX_TOKENS),
        engine__name="moody",
        engine__replicas=2,
        engine__slow_one=lab.folder / "slow-one",
        data__packing="false",
        train__ranks=2,
        train__steps=LONG,
    )
    run.train_on(1)
    return run


@pytest.mark.slow
def test_no_second_run_in_a_directory(lab, two_and_two) -> None:
    second = lab.start(two_and_two.output, placement__kind="disaggregated")
    assert second.wait(60) == 2
    assert (
        second.last_line()
        == f"spec-trainer: error: output {two_and_two.output} is in use by a run that is under way"
    )


@pytest.mark.slow
def test_processes_take_memory_in_turns(two_and_two) -> None:
    """The second engine when the first one is ready, the ranks when both are."""
    names = ["engine-0", "engine-1", "trainer-0", "trainer-1"]
    logs = two_and_two.output / "logs"
    limited = {name: _when(logs / f"{name}.log", "limited to") for name in names}
    ready = {name: _when(two_and_two.errors, f"{name} is ready") for name in names}
    assert limited["engine-0"] <= ready["engine-0"] <= limited["engine-1"] <= ready["engine-1"]
    assert ready["engine-1"] <= min(limited["trainer-0"], limited["trainer-1"])


@pytest.mark.slow
def test_two_runs_of_one_host_at_once(lab, inline, two_and_two, monkeypatch) -> None:
    """The other one has an engine and a trainer; its own process imports nothing of torch.distributed."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # workers write that into their logs
    small = lab.start(
        lab.folder / "one-one",
        placement__kind="disaggregated",
        train__steps=SHOWN,
        train__accumulation=4,
        data__packing="false",
    )
    for run in (small, two_and_two):
        assert run.wait(150) == 0, run.story()
        assert_same_curve(run.output, inline)
    assert (lab.folder / "slow-one").exists()
    imported = small.errors.read_text()
    assert "import time:" in imported
    assert "torch.distributed" not in imported


def _when(log: Path, words: str) -> datetime:
    (line,) = [line for line in log.read_text().splitlines() if words in line]
    stamp = re.match(r"[\d-]+ [\d:]+,\d+", line)
    assert stamp is not None, line
    return datetime.strptime(stamp[0], "%Y-%m-%d %H:%M:%S,%f")
