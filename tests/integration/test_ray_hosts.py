"""A run on three hosts of a Ray cluster that share no folder: network namespaces of this machine."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import psutil
import pytest

from spec_processes import WORKER_MODULE
from spec_trainer.training.checkpoint.folder import check_whole

from .launching import Lab, Run
from .namespaces import RayHosts, ray_hosts
from .run_directory import losses, newest_checkpoint, trained

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif("SPEC_TEST_ALL_OF_RAY" not in os.environ, reason="minutes: make test-ray")

STEPS = 12
LONG = 120
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
    lab, hosts, uninterrupted
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


def test_engines_of_other_hosts_capture_into_a_folder_that_ranks_train_from(
    lab, hosts, uninterrupted
) -> None:
    folder = hosts.hidden / "features"
    engines = {**ON_HOSTS, "engine__replicas": 2, "train__ranks": 1}
    run = lab.start(folder, "capture", launcher__address=hosts.address, **engines)
    assert run.wait(150) == 0, run.story()
    output = hosts.hidden / "from-features"
    lab.train(output, data__features=folder, train__ranks=2, train__steps=STEPS)
    assert losses(output) == pytest.approx(losses(uninterrupted)[:STEPS], rel=1e-5)
    assert trained(output) == {step: trained(uninterrupted)[step] for step in range(1, STEPS + 1)}


def test_a_run_goes_on_with_fewer_trainers_while_a_host_is_gone(lab, hosts, uninterrupted) -> None:
    """On two, one, and two trainers again: the same data, and the same losses but for the order of sums."""
    output = hosts.hidden / "elastic"
    tries = {"train__restarts": 9, "engine__replacements": 0}
    run = lab.start(output, launcher__address=hosts.address, **{**ON_HOSTS, **tries, "train__steps": LONG})
    run.save_on()
    hosts.stop(3)
    run.until_ready(times=2)
    fewer = "the run goes on with 1 of 2 trainer ranks and 1 of 3 engine replicas, without host"
    assert fewer in said(run)
    run.save_on()
    victim = trainer(hosts)
    victim.suspend()  # so that the run is not over before
    hosts.start(3)
    victim.kill()
    run.until_ready(times=3)
    assert "the run goes on with 2 of 2 trainer ranks and 3 of 3 engine replicas" in said(run)
    assert run.wait(240) == 0, run.story()
    assert losses(output) == pytest.approx(losses(uninterrupted)[:LONG], rel=1e-5)
    assert samples(output) == {step: samples(uninterrupted)[step] for step in range(1, LONG + 1)}


def test_an_engine_moves_to_another_host_and_back(lab, hosts, uninterrupted) -> None:
    """One host of three trains, one captures and one is free; one after the other the latter two go, and one comes
    back."""
    output = hosts.hidden / "moved"
    alone = {"engine__replicas": 1, "train__ranks": 1, "engine__replacements": 9, "train__steps": LONG}
    run = lab.start(output, launcher__address=hosts.address, **{**ON_HOSTS, **alone})
    run.save_on()
    hosts.stop(2)
    run.until_ready("engine-0", times=2)
    run.train_on()
    hosts.stop(3)
    run.until(lambda: f"engine-0 has lost its host {hosts.host(3)}, and no other has 1 free CPU" in said(run))
    hosts.start(2)
    assert run.wait(240) == 0, run.story()
    assert said(run).count("engine-0 is ready") == 3
    assert losses(output) == pytest.approx(losses(uninterrupted)[:LONG], rel=1e-5)
    assert samples(output) == {step: samples(uninterrupted)[step] for step in range(1, LONG + 1)}
    hosts.start(3)


def said(run: Run) -> str:
    return run.errors.read_text()


def samples(output: Path) -> dict[int, list[int]]:
    """Step -> sample ids, whoever trained them."""
    return {step: sorted(chain(*ranks)) for step, ranks in trained(output).items()}


def trainer(hosts: RayHosts) -> psutil.Process:
    """Trainer rank 0, on the run's own host."""
    for process in psutil.Process(hosts.processes[1].pid).children(recursive=True):
        with suppress(psutil.Error):
            if process.cmdline()[-4:-2] == [WORKER_MODULE, "trainer-0"]:
                return process
    raise AssertionError("there is no trainer-0")


def test_a_cut_link_ends_the_run_with_a_named_error(lab, hosts) -> None:
    output = hosts.hidden / "cut"
    run = lab.start(output, launcher__address=hosts.address, **{**ON_HOSTS, "train__steps": 10_000})
    run.save_on()
    hosts.cut(2)
    assert run.wait(240) == 1
    words = r"error: (engine|trainer)-1 was lost: Ray's node of its host \S+ does not answer; see "
    assert re.search(words, run.last_line())
