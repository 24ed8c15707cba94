"""The entry of every worker, in real processes of the local launcher."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from spec_core import Launcher, WorkerHandle, WorkerSpec
from spec_launcher_local.launcher import LocalLauncher
from spec_testing.launcher_bench import construct, message, received
from spec_trainer.workers.protocol import Begin, Failed, WorkerOrder


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    with construct(LocalLauncher, tmp_path) as launcher:
        yield launcher


def start(launcher: Launcher, program: str, init_order: int = 0) -> WorkerHandle:
    order = WorkerOrder(
        name="engine-0", program=f"worker_programs:{program}", index=0, memory_fraction=None, init_order=init_order,
        config={}, token="", dataset="",
    )  # fmt: skip
    entry = "spec_trainer.workers.worker_main:run_worker"
    return launcher.start([WorkerSpec(name="engine-0", entry=entry, arguments=asdict(order), role="engine")])[
        "engine-0"
    ]


@pytest.mark.parametrize(
    ("program", "report"),
    [
        ("failing", Failed("ValueError", "what went wrong", False)),
        ("unlogged", Failed("OSError", "[Errno 28] No space left on device", False)),
        ("misused", Failed("ConfigError", "engine.colour=blue: expected red", True)),
    ],
)
def test_a_failure_is_one_line_and_the_log_has_the_rest(launcher, tmp_path, program, report):
    start(launcher, program)
    assert message(launcher) == report.to_json()
    log = (tmp_path / "engine-0.log").read_text()
    assert program == "unlogged" or ("Traceback" in log and "raise " in log)


def test_a_program_that_does_not_import_is_a_failure_with_its_cause(launcher):
    start(launcher, "nothing")
    assert message(launcher)["error"] == "AttributeError"
    assert "ended with exit code 1" in received(launcher).how


def test_a_worker_waits_for_its_turn(launcher):
    worker = start(launcher, "obedient", init_order=1)
    assert launcher.receive(time.monotonic() + 3.0) is None
    worker.send(Begin().to_json())
    assert message(launcher)["kind"] == "Ready"


def test_sigterm_and_sighup_are_the_controllers_to_act_on(launcher):
    start(launcher, "obedient")
    process = psutil.Process(int(message(launcher)["address"]))
    process.terminate()
    process.send_signal(signal.SIGHUP)
    assert launcher.receive(time.monotonic() + 0.5) is None
    assert process.is_running()
