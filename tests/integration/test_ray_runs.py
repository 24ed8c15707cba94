"""Whole runs by the launcher ray: the loss curve is that of ``local``, a killed actor ends the run with its name."""

import os
import re
from pathlib import Path

import psutil
import pytest

from spec_core.errors import ConfigError, RunError
from spec_processes import WORKER_MODULE
from spec_testing.launcher_bench import assert_soon, construct, is_running, toy

from .launching import Lab
from .leftovers import assert_fails, belongings
from .ray_nodes import ray_nodes
from .run_directory import losses

ray = pytest.importorskip("ray")
RayLauncher = pytest.importorskip("spec_launcher_ray.launcher").RayLauncher
pytestmark = pytest.mark.skipif("SPEC_TEST_ALL_OF_RAY" not in os.environ, reason="starts Ray: make test-ray")

STEPS = 12
BY_RAY = {"launcher__name": "ray", "engine__replicas": 3, "train__ranks": 2, "train__steps": STEPS}


@pytest.fixture(scope="module")
def output(lab: Lab) -> Path:
    return lab.folder / "by-ray"


def workers(output: Path) -> dict[str, psutil.Process]:
    """Every worker of a run on this machine, by its open log."""
    logs = {str(file): file.stem for file in (output / "logs").glob("*-[0-9].log")}
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if WORKER_MODULE in (process.info["cmdline"] or ()):
            found |= {logs[file.path]: process for file in process.open_files() if file.path in logs}
    return found


@pytest.mark.slow
def test_a_killed_engine_actor_is_replaced_and_a_killed_trainer_ends_the_run(
    lab, output, ray_cluster, monkeypatch
) -> None:
    """Three engines and two trainers on a cluster of somebody else; the process of the run itself imports nothing of
    torch.distributed."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # workers have the environment of the cluster
    run = lab.start(output, placement__kind="disaggregated", **BY_RAY)
    run.save_on()
    imported = run.errors.read_text()
    assert "import time:" in imported
    assert "torch.distributed" not in imported
    started = workers(output)
    assert sorted(started) == ["engine-0", "engine-1", "engine-2", "trainer-0", "trainer-1"]
    started["trainer-1"].suspend()  # the other engines do not end the run meanwhile
    started["engine-1"].parent().kill()
    run.until_ready("engine-1", times=2)
    assert "engine-1 was lost with its Ray actor" in (output / "logs" / "replacements.jsonl").read_text()
    started |= workers(output)
    actors = [process.parent() for process in started.values()]
    started["trainer-1"].parent().kill()
    assert_fails(run, belongings(run), "trainer-1 was lost with its Ray actor", "trainer-1.log", within_s=60)
    assert_soon(lambda: not any(is_running(one.pid) for one in [*started.values(), *actors]))


@pytest.mark.slow
def test_a_colocated_run_on_its_own_cluster_is_bitwise_that_of_local(
    lab, output, uninterrupted, monkeypatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    lab.train(output, placement__kind="colocated", **{**BY_RAY, "engine__replicas": 1})
    assert workers(output) == {}
    assert len(losses(output)) == STEPS
    assert losses(output) == losses(uninterrupted)[:STEPS]


@pytest.mark.timeout(600)
def test_workers_end_with_their_node_and_an_engine_starts_on_the_next_one(lab, uninterrupted) -> None:
    """The engine's node is lost while it starts one in its place; that of a trainer ends the run."""
    output = lab.folder / "raylet"
    keys = {
        **BY_RAY,
        "engine__replicas": 1,
        "train__steps": 10_000,
        "launcher__env": {"OMP_NUM_THREADS": "1"},
    }
    with ray_nodes(3) as nodes:
        run = lab.start(output, placement__kind="disaggregated", launcher__address=nodes.address, **keys)
        run.save_on()
        started = workers(output)
        hosts = {name: nodes.node_of(started[name]) or "own" for name in ("engine-0", "trainer-1")}
        nodes.stop_raylet(hosts["engine-0"])
        started["engine-0"].kill()
        run.until(lambda: "engine-0 is replaced (1 of" in run.errors.read_text())
        nodes.kill_raylet(hosts["engine-0"])
        words = f"engine-0 has lost its host {hosts['engine-0']}, and no other has 1 free CPU"
        run.until(lambda: words in run.errors.read_text(), 60)
        nodes.clear(hosts["engine-0"])
        nodes.start(hosts["engine-0"])
        run.until_ready("engine-0", times=2)
        run.train_on()
        nodes.kill_raylet(hosts["trainer-1"])
        assert run.wait(60) == 1, run.story()
        assert_soon(lambda: not nodes.processes())
    gone = {name: f"Ray's node of its host {host} does not answer" for name, host in hosts.items()}
    assert f"error: trainer-1 was lost: {gone['trainer-1']}; see " in run.last_line()
    causes = (output / "logs" / "replacements.jsonl").read_text()
    assert f"engine-0 cannot be started: {gone['engine-0']}" in causes
    found, expected = losses(output), losses(uninterrupted)
    assert all(one == other for one, other in zip(found, expected, strict=False))


def test_a_run_on_one_host_ends_with_rays_node_and_nothing_is_replaced(lab) -> None:
    output = lab.folder / "one-host"
    keys = {**BY_RAY, "engine__replicas": 1, "train__ranks": 1, "train__steps": 10_000}
    with ray_nodes(1) as nodes:
        run = lab.start(output, placement__kind="colocated", launcher__address=nodes.address, **keys)
        run.save_on()
        nodes.kill_own_raylet()
        assert run.wait(60) == 1, run.story()
        assert_soon(lambda: not nodes.processes())
    words = r"error: (engine|trainer)-0 was lost: Ray's node of its host \S+ does not answer; see \S+-0\.log$"
    assert re.search(words, run.last_line())
    assert not (output / "logs" / "replacements.jsonl").exists()


def test_devices_that_others_use_are_named(ray_cluster, tmp_path) -> None:
    @ray.remote(num_cpus=0.5)
    class Other:
        def pid(self) -> int:
            return os.getpid()

    other = Other.remote()
    ray.get(other.pid.remote())
    with construct(RayLauncher, tmp_path, resources_s=0.5) as launcher:
        words = r"^host \S+ has 1.5 of 2 CPU free within launcher.resources_s=0.5 s"
        with pytest.raises(RunError, match=words):
            launcher.start([toy("echo")])
    ray.kill(other)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"hosts": ("elsewhere",)},
            r"^launcher.hosts names 'elsewhere', which the Ray cluster at \S+ does not have",
        ),
        (
            {"labels": {"zone": "a"}},
            r"has no host with labels {'zone': 'a'} and the resource CPU: \S+ has CPU 2$",
        ),
        (
            {"address": "ray://127.0.0.1:1"},
            r"^launcher.address=ray://127.0.0.1:1: the run itself must be on a host",
        ),
    ],
)
def test_what_can_never_be_had_is_bad_usage(ray_cluster, tmp_path, options, words) -> None:
    with construct(RayLauncher, tmp_path, **options) as launcher, pytest.raises(ConfigError, match=words):
        launcher.num_devices()
