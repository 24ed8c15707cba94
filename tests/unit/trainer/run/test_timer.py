"""Seconds by name add up."""

import time

import pytest

from spec_trainer.run.timer import Timer


def test_names_add_up_and_the_rest_is_other():
    timer = Timer()
    for _ in range(3):
        with timer("step"):
            time.sleep(0.02)
    time.sleep(0.03)
    parts = timer.breakdown()
    assert parts.keys() == {"step", "other"}
    assert 0.06 <= parts["step"] < 0.5
    assert parts["other"] >= 0.03
    assert 0.02 <= timer.last_s["step"] <= parts["step"] - 0.04
    assert timer.wall_s == pytest.approx(sum(parts.values()), abs=0.05)


def test_time_counts_although_the_work_failed():
    timer = Timer()
    with pytest.raises(ValueError, match="no"), timer("step"):
        raise ValueError("no")
    assert timer.total_s["step"] > 0
