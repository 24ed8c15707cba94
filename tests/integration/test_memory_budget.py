"""Memory of a shared device, with a stranger's backend whose memory is known (stranger.py): 1 GiB, of which a process
takes 64 MiB besides what it is limited to."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import CommandLine
from .launching import Lab

LIMITED = {"backend__name": "limited", "placement__kind": "colocated"}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _strangers_plugins(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in lab.python_path.split(os.pathsep):
        monkeypatch.syspath_prepend(folder)


@pytest.fixture
def plan(lab: Lab, command_line: CommandLine) -> Callable[..., dict[str, Any]]:
    """``plan(train__steps=5)``: the document."""
    return lambda **keys: json.loads(command_line(*lab.plan_words(**keys)).out)


def test_plan_tells_the_budget_of_each_process(plan) -> None:
    document = plan(**LIMITED, engine__replicas=2, placement__window_bytes=100 * MIB)
    assert document["device_bytes"] == 1024 * MIB
    half = (1024 - 3 * 64 - 100) * MIB // 2
    assert document["device_memory"] == {
        "engine-0": {"devices": [0], "limit_bytes": half // 2, "uncounted_bytes": 64 * MIB},
        "engine-1": {"devices": [0], "limit_bytes": half // 2, "uncounted_bytes": 64 * MIB},
        "trainer-0": {"devices": [0], "limit_bytes": half, "uncounted_bytes": 164 * MIB},
    }
    assert "device_memory" not in plan(placement__kind="colocated")


def test_what_does_not_fit_is_refused_before_anything_starts(lab, command_line) -> None:
    output = lab.folder / "too-much"
    fractions = {"placement__engine_fraction": 0.5, "placement__trainer_fraction": 0.45}
    line = command_line(*lab.words(output, **LIMITED, **fractions)).error
    assert "a device of 1.0 GiB does not hold placement.engine_fraction=0.5 (0.5 GiB)" in line
    assert "lower the fractions to 0.874 together" in line
    assert not output.exists()


@pytest.mark.slow
def test_each_process_has_to_fit_in_its_part_of_the_device(lab, plan, command_line) -> None:
    rooms = plan(**LIMITED)["resources"]
    engine, trainer = (rooms[f"{name}-0's part of a device"] for name in ("engine", "trainer"))
    assert 0 < engine["least_bytes"] < engine["free_bytes"]
    assert trainer["parts"]["weights, gradients and optimizer state of the draft"] > 0
    assert "this host's memory" in rooms
    keys = {**LIMITED, "placement__trainer_fraction": 0.0001}
    for words in (lab.plan_words(**keys), lab.words(lab.folder / "no-room", **keys)):
        line = command_line(*words).error
        assert "trainer-0's part of a device does not hold the run: it takes" in line
        assert "raise train.ranks, or choose a smaller draft" in line
