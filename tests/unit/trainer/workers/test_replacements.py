"""Replacements of engines are counted over a day, each engine by itself."""

import json

import pytest

from spec_core.errors import PeerLost, RunError
from spec_trainer.workers.failures import Failure
from spec_trainer.workers.replacements import DAY_S, Replacements

ENGINES = {"engine-0", "engine-1"}


@pytest.fixture
def clock() -> list[float]:
    """Return a list whose one value is the time."""
    return [0.0]


@pytest.fixture
def replacements(clock, tmp_path) -> Replacements:
    return Replacements(2, tmp_path / "replacements.jsonl", lambda: clock[0])


def died(worker: str) -> list[Failure]:
    return [Failure(worker, PeerLost(f"{worker} died"), 0)]


def test_an_engine_that_fails_once_in_a_while_is_always_replaced(replacements, clock, tmp_path) -> None:
    for _ in range(10):
        replacements.note(died("engine-0"), ENGINES, 5)
        clock[0] += DAY_S / 2
    assert len((tmp_path / "replacements.jsonl").read_text().splitlines()) == 10


def test_an_engine_that_fails_too_often_within_a_day_ends_the_run(replacements, clock, tmp_path) -> None:
    for _ in range(2):
        replacements.note(died("engine-0"), ENGINES, 5)
        clock[0] += DAY_S / 3
    replacements.note(died("engine-1"), ENGINES, 5)
    with pytest.raises(
        RunError, match=r"^engine-0 died; engine.replacements=2 allows no other replacement in a day$"
    ):
        replacements.note(died("engine-0"), ENGINES, 6)
    rows = [json.loads(line) for line in (tmp_path / "replacements.jsonl").read_text().splitlines()]
    assert [row["worker"] for row in rows] == ["engine-0", "engine-0", "engine-1"]
