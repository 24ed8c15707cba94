"""A run on three hosts of a Ray cluster that share no folder: network namespaces of this machine."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from spec_trainer.checkpoint.folder import check_whole

from .launching import losses, newest_checkpoint, trained
from .namespaces import RayHosts, ray_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .launching import Lab

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif("SPEC_TEST_ALL_OF_RAY" not in os.environ, reason="minutes: make test-ray")

STEPS = 12
WORKERS = ["engine-0", "engine-1", "engine-2", "trainer-0", "trainer-1"]
ON_HOSTS = {
    "launcher__name": "ray",
    "placement__kind": "disaggregated",
    "engine__replicas": 3,
    "train__ranks": 2,
    "train__steps": STEPS,
    # Where an engine has the cores of a host to itself, its sums have another order.
    "launcher__env": {"OMP_NUM_THREADS": "1"},
}


@pytest.fixture(scope="module")
def hosts(lab: Lab) -> Iterator[RayHosts]:
    with ray_hosts(lab.folder / "hidden", 3) as found:
        yield found


def test_a_run_on_three_hosts_without_a_shared_folder_is_that_of_local_bit_for_bit(
    lab: Lab, hosts: RayHosts, uninterrupted: Path
) -> None:
    """In two commands, so that a rank resumes that does not see the checkpoint."""
    output = hosts.hidden / "run"
    for steps in STEPS // 2, STEPS:
        lab.train(output, launcher__address=hosts.address, **{**ON_HOSTS, "train__steps": steps})
        assert newest_checkpoint(output) == steps
        check_whole(output / "checkpoints" / f"step-{steps}")
    assert losses(output) == losses(uninterrupted)[:STEPS]
    assert trained(output) == {step: trained(uninterrupted)[step] for step in range(1, STEPS + 1)}
    for name in WORKERS:
        assert "Traceback" not in (output / "logs" / f"{name}.log").read_text()


def test_a_cut_link_ends_the_run_with_a_named_error(lab: Lab, hosts: RayHosts) -> None:
    output = hosts.hidden / "cut"
    run = lab.start(output, launcher__address=hosts.address, **{**ON_HOSTS, "train__steps": 10_000})
    run.save_on()
    hosts.cut(2)
    assert run.wait(240) == 1
    assert re.search(
        r"error: (engine|trainer)-1 was lost: .* its host does not answer; see ", run.last_line()
    )
