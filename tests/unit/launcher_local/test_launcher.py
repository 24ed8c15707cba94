"""Promises of the local launcher beyond LauncherSuite (``tests/contract/test_local_launcher.py``)."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spec_core import Launcher, WorkerEnded
from spec_launcher_local import launcher as launcher_module
from spec_launcher_local.launcher import LocalLauncher
from spec_testing.launcher_bench import PEER_S, assert_soon, construct, is_running, message, received, toy
from spec_testing.resources import check_released, settled_resources


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with construct(LocalLauncher, tmp_path) as launcher:
        yield launcher


@pytest.mark.parametrize(
    ("how", "words"),
    [("return", "ended with exit code 0"), ("raise", "ended with exit code 1"), ("exit", "ended with exit code 3"),
     ("SIGABRT", "was killed by signal 6"), ("SIGKILL", "was killed by signal 9")],
)  # fmt: skip
def test_an_end_is_told_with_its_cause_and_its_log(launcher, tmp_path, how, words):
    launcher.start([toy("count_and_end", how=how)])
    ended = [received(launcher) for _ in range(101)][-1]
    assert isinstance(ended, WorkerEnded)
    assert ended.how == f"{words}; see {tmp_path}/toy-0.log"


def test_a_silent_worker_is_lost_and_the_message_names_the_setting(launcher, caplog):
    worker = launcher.start([toy("echo")])["toy-0"]
    process = psutil.Process(message(launcher)["pid"])
    worker.watch()
    process.suspend()
    ended = received(launcher)
    assert ended.how == f"has been silent for timeouts.peer_s={PEER_S} s"
    launcher.replace(worker)
    assert caplog.text == ""


def test_a_worker_that_has_let_go_and_does_not_end_has_ended(launcher, monkeypatch):
    """As a process does that waits inside a driver: its descriptors are closed already."""
    monkeypatch.setattr("spec_launcher_local.launcher._UNKILLABLE_S", 0.5)
    launcher.start([toy("close_everything")])
    ended = received(launcher)
    assert ended.how.startswith("has closed its connection to the launcher and does not end; see ")
    assert not ended.killed


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_log_of_a_worker_that_hangs_says_where(launcher, tmp_path, is_replaced):
    worker = launcher.start([toy("hold_interpreter")])["toy-0"]
    hanging = message(launcher)["pid"]
    if is_replaced:
        launcher.replace(worker)
    launcher.stop(0.2)
    assert not is_running(hanging)
    assert "in hold_interpreter" in (tmp_path / "toy-0.log").read_text()


def test_a_workers_group_is_killed_when_its_end_is_told_and_never_later(launcher, monkeypatch):
    """Later the number of the group may be another's."""
    launcher.start([toy("stubborn")])
    worker, child = message(launcher)["pids"]
    psutil.Process(worker).kill()
    assert received(launcher).killed
    assert_soon(lambda: not is_running(child))
    killed = []
    monkeypatch.setattr(launcher_module, "end_group", killed.append)
    launcher.stop(1.0)
    assert killed == []


def test_gloo_listens_on_loopback_unless_the_user_says_otherwise(launcher, monkeypatch):
    for name, given in (("default-0", None), ("given-0", "eth7")):
        if given:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
        launcher.start([toy("echo", name, variables=["GLOO_SOCKET_IFNAME"])])
        assert message(launcher)["environment"] == {"GLOO_SOCKET_IFNAME": given or "lo"}


def test_closing_waits_for_no_reaper_that_was_stopped(tmp_path):
    before = set(psutil.Process().children())
    with construct(LocalLauncher, tmp_path) as launcher:
        launcher.start([])
        (reaper,) = set(psutil.Process().children()) - before
        reaper.suspend()
    assert not reaper.is_running()


_PATIENT = """
import pathlib, sys, time
from spec_testing.launcher_bench import construct, message, toy
from spec_launcher_local.launcher import LocalLauncher

with construct(LocalLauncher, pathlib.Path(sys.argv[1])) as launcher:
    worker = launcher.start([toy("echo")])["toy-0"]
    message(launcher)
    worker.watch()
    print("up", flush=True)
    sys.exit(launcher.receive(time.monotonic() + 8.0) is not None)
"""


def test_a_launcher_that_was_itself_stopped_blames_nobody(tmp_path):
    """Ctrl-Z, and fg after longer than ``timeouts.peer_s``."""
    words = [sys.executable, "-c", _PATIENT, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(2 * PEER_S)
        process.send_signal(signal.SIGCONT)
    assert process.returncode == 0


def test_several_runs_in_one_process_leave_no_descriptor_and_no_thread(tmp_path):
    def run() -> None:
        with construct(LocalLauncher, tmp_path) as launcher:
            launcher.start([toy("echo")])
            message(launcher)

    run()
    before, children = settled_resources(), psutil.Process().children()
    for _ in range(3):
        run()
    check_released(before)
    assert psutil.Process().children() == children
