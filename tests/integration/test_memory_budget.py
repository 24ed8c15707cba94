"""Memory of a shared device, with a stranger's backend whose memory is known (stranger.py): 1 GiB, of which a process
takes 64 MiB besides what it is limited to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .launching import Lab

LIMITED = {"backend__name": "limited", "placement__kind": "colocated"}
MIB = 1 << 20


@pytest.mark.slow
def test_plan_tells_the_budget_of_each_process(lab: Lab) -> None:
    planned = lab.plan(**LIMITED, engine__replicas=2, placement__window_bytes=100 * MIB)
    document = json.loads(planned.stdout)
    assert document["device_bytes"] == 1024 * MIB
    half = (1024 - 3 * 64 - 100) * MIB // 2
    assert document["device_memory"] == {
        "engine-0": {"devices": [0], "limit_bytes": half // 2, "uncounted_bytes": 64 * MIB},
        "engine-1": {"devices": [0], "limit_bytes": half // 2, "uncounted_bytes": 64 * MIB},
        "trainer-0": {"devices": [0], "limit_bytes": half, "uncounted_bytes": 164 * MIB},
    }
    assert "device_memory" not in json.loads(lab.plan(placement__kind="colocated").stdout)


def test_what_does_not_fit_is_refused_before_anything_starts(lab: Lab) -> None:
    run = lab.start(
        lab.folder / "too-much", **LIMITED, placement__engine_fraction=0.5, placement__trainer_fraction=0.45
    )
    assert run.wait(60) == 2
    (line,) = run.errors.read_text().splitlines()
    assert "a device of 1.0 GiB does not hold placement.engine_fraction=0.5 (0.5 GiB)" in line
    assert "lower the fractions to 0.874 together" in line
    assert not run.output.exists()


def test_each_process_has_to_fit_in_its_part_of_the_device(lab: Lab) -> None:
    rooms = json.loads(lab.plan(**LIMITED).stdout)["resources"]
    engine, trainer = (rooms[f"{name}-0's part of a device"] for name in ("engine", "trainer"))
    assert 0 < engine["least_bytes"] < engine["free_bytes"]
    assert trainer["parts"]["weights, gradients and optimizer state of the draft"] > 0
    assert "this host's memory" in rooms
    planned = lab.plan(**LIMITED, placement__trainer_fraction=0.0001)
    run = lab.start(lab.folder / "no-room", **LIMITED, placement__trainer_fraction=0.0001)
    assert (planned.returncode, run.wait(60)) == (2, 2)
    for line in (planned.stderr, run.errors.read_text()):
        assert line.count("\n") == 1
        assert "trainer-0's part of a device does not hold the run: it takes" in line
        assert "raise train.ranks, or choose a smaller draft" in line
