"""The supervisor with real child processes, without torch."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from spec_core.errors import DeadlineExceeded, PeerLost, RunError, UsageError
from spec_core.testing.resources import settled_resources
from spec_launcher_local.supervisor import Child, Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER_S = 1.0
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """For children that do not end when asked."""
    monkeypatch.setattr("spec_launcher_local.supervisor._GRACE_S", 0.3)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path, PEER_S) as supervisor:
        yield supervisor


def spawn(supervisor: Supervisor, role: str, name: str = "") -> Child:
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    return supervisor.spawn(name or role, {"entry": f"roles:{role}"}, env)


def until_silent_or_failed(supervisor: Supervisor) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        supervisor.next_event(deadline)


def test_records_arrive_with_their_child_and_stop_ends_it(supervisor: Supervisor) -> None:
    child = spawn(supervisor, "obedient")
    event = supervisor.next_event()
    assert event is not None
    assert (event.child, event.record) == (child, {"kind": "ready", "pid": child.process.pid})
    child.tell("stop")
    supervisor.next_event()
    supervisor.wait_all(PATIENCE_S)
    assert child.process.returncode == 0


def test_it_is_woken_and_has_deadlines(supervisor: Supervisor) -> None:
    spawn(supervisor, "obedient")
    supervisor.next_event()
    supervisor.wake()
    assert supervisor.next_event() is None
    start = time.monotonic()
    assert supervisor.next_event(start + 0.2) is None
    assert 0.2 <= time.monotonic() - start < PEER_S


def test_a_killed_child_is_named_with_its_signal_and_its_log(supervisor: Supervisor, tmp_path: Path) -> None:
    child = spawn(supervisor, "obedient")
    supervisor.next_event()
    child.process.kill()
    with pytest.raises(PeerLost, match=f"^obedient was killed by signal 9; see {tmp_path}/obedient.log$"):
        supervisor.next_event()


def test_a_child_that_ends_without_a_word_is_lost(supervisor: Supervisor) -> None:
    spawn(supervisor, "quitter")
    with pytest.raises(PeerLost, match="quitter ended with exit code 3"):
        supervisor.next_event()


def test_a_failure_is_one_line_and_the_log_has_the_rest(supervisor: Supervisor, tmp_path: Path) -> None:
    spawn(supervisor, "failing")
    with pytest.raises(RunError, match=r"^failing: ValueError: what went wrong$"):
        supervisor.next_event()
    log = (tmp_path / "failing.log").read_text()
    assert "Traceback" in log
    assert "and where" in log


def test_a_failure_is_told_also_where_the_log_has_no_room_for_it(supervisor: Supervisor) -> None:
    spawn(supervisor, "unheard")
    with pytest.raises(RunError, match=r"^unheard: OSError: \[Errno 28\] No space left on device$"):
        supervisor.next_event()


def test_bad_usage_found_in_a_child_is_bad_usage(supervisor: Supervisor) -> None:
    spawn(supervisor, "misused")
    with pytest.raises(UsageError, match=r"^engine.colour=blue: expected red$"):
        supervisor.next_event()


@pytest.mark.parametrize(
    ("cause", "blamed"), [("failing", "failing: ValueError"), ("quitter", "quitter ended")]
)
def test_the_cause_is_told_rather_than_what_follows_from_it(
    supervisor: Supervisor, cause: str, blamed: str
) -> None:
    children = [spawn(supervisor, role) for role in ("bereft", cause)]
    children[0].process.wait()  # its failure is heard first
    with pytest.raises(RunError, match=blamed):
        supervisor.next_event()


@pytest.mark.parametrize("accomplice", ["failing", "aborting"])
def test_a_child_that_somebody_killed_is_the_cause_of_what_others_report_before(
    supervisor: Supervisor, accomplice: str
) -> None:
    """A killed process ends slowly where a driver takes its memory back."""
    victim = spawn(supervisor, "obedient")
    supervisor.next_event()
    spawn(supervisor, accomplice).process.wait()
    victim.process.kill()
    with pytest.raises(RunError, match=r"^obedient was killed by signal 9"):
        supervisor.next_event()


@pytest.mark.parametrize("collateral", ["failing", "broken_device", None])
def test_what_has_died_on_the_host_is_the_cause(tmp_path: Path, collateral: str | None) -> None:
    def check_host() -> None:
        if time.monotonic() > since + 0.3:
            raise RunError("the daemon died")

    with Supervisor(tmp_path, PEER_S, check_host) as supervisor:
        since = math.inf
        spawn(supervisor, "obedient")
        supervisor.next_event()
        if collateral is not None:
            spawn(supervisor, collateral).process.wait()
        since = time.monotonic()
        with pytest.raises(RunError, match=r"^the daemon died$"):
            supervisor.next_event()


def test_a_child_waits_for_its_turn_where_its_order_says_so(supervisor: Supervisor) -> None:
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    child = supervisor.spawn("late", {"entry": "roles:obedient", "waits": True}, env)
    assert supervisor.next_event(time.monotonic() + PEER_S) is None
    child.tell("begin")
    event = supervisor.next_event()
    assert event is not None
    assert event.record is not None
    assert event.record["kind"] == "ready"


def test_a_stopped_child_is_lost(supervisor: Supervisor) -> None:
    child = spawn(supervisor, "obedient")
    supervisor.next_event()
    child.process.send_signal(signal.SIGSTOP)
    with pytest.raises(PeerLost, match=r"^obedient has been silent for timeouts.peer_s=1.0 s$"):
        until_silent_or_failed(supervisor)


def test_a_child_that_has_let_go_and_does_not_end_is_lost(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_launcher_local.supervisor._UNKILLABLE_S", 0.5)
    spawn(supervisor, "silent")
    with pytest.raises(
        PeerLost, match=r"^silent has let go of the launcher and does not end; see .*silent.log$"
    ):
        supervisor.next_event()


def test_a_child_that_lives_is_not_lost_however_long_nothing_happens(supervisor: Supervisor) -> None:
    spawn(supervisor, "deaf")
    supervisor.next_event()
    assert supervisor.next_event(time.monotonic() + 3 * PEER_S) is None


def test_before_it_is_ready_a_child_may_be_silent(supervisor: Supervisor) -> None:
    child = spawn(supervisor, "loading")
    supervisor.next_event()
    child.process.send_signal(signal.SIGSTOP)
    assert supervisor.next_event(time.monotonic() + 2.5 * PEER_S) is None


def test_a_child_that_reads_nothing_does_not_hold_the_launcher_up(supervisor: Supervisor) -> None:
    child = spawn(supervisor, "deaf")
    supervisor.next_event()
    with pytest.raises(DeadlineExceeded, match=r"^deaf: the control channel was not read within 1.0 s"):
        child.tell("capture", ids=[0] * (1 << 20))


def test_what_is_told_to_a_dead_child_is_no_failure_of_its_own(supervisor: Supervisor) -> None:
    child = spawn(supervisor, "obedient")
    supervisor.next_event()
    child.process.kill()
    child.process.wait()
    child.tell("stop")
    with pytest.raises(PeerLost, match="obedient was killed by signal 9"):
        supervisor.next_event()


def test_sigterm_is_the_launcher_s_to_act_on(supervisor: Supervisor) -> None:
    child = spawn(supervisor, "obedient")
    supervisor.next_event()
    child.process.terminate()
    assert supervisor.next_event(time.monotonic() + 0.5) is None
    assert child.process.poll() is None


def test_leaving_ends_children_and_what_they_have_started(tmp_path: Path) -> None:
    with Supervisor(tmp_path, PEER_S) as supervisor:
        spawn(supervisor, "parent")
        event = supervisor.next_event()
        assert event is not None
        assert event.record is not None
        pid = event.record["pid"]
        assert psutil.pid_exists(pid)
    _assert_ends(pid)


def test_leaving_waits_for_no_guardian_that_was_stopped(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with Supervisor(tmp_path, PEER_S):
        (guardian,) = set(psutil.Process().children()) - before
        guardian.send_signal(signal.SIGSTOP)
    assert not guardian.is_running()


_PATIENT = """
import pathlib, sys, time
from spec_launcher_local.supervisor import Supervisor

with Supervisor(pathlib.Path(sys.argv[1]), 1.0) as supervisor:
    child = supervisor.spawn("obedient", {"entry": "roles:obedient"}, {"PYTHONPATH": sys.argv[2]})
    supervisor.next_event()
    print("up", flush=True)
    deadline = time.monotonic() + 4.0
    while time.monotonic() < deadline:
        supervisor.next_event(deadline)
    child.tell("stop")
"""


def test_a_launcher_that_was_itself_stopped_blames_nobody(tmp_path: Path) -> None:
    """Ctrl-Z, and fg after longer than ``timeouts.peer_s``."""
    words = [sys.executable, "-c", _PATIENT, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(2 * PEER_S)
        launcher.send_signal(signal.SIGCONT)
    assert launcher.returncode == 0


_LAUNCHER = """
import os, pathlib, signal, sys
from spec_launcher_local.supervisor import Supervisor

with Supervisor(pathlib.Path(sys.argv[1]), 1.0) as supervisor:
    supervisor.spawn("parent", {"entry": "roles:parent"}, {"PYTHONPATH": sys.argv[2]})
    print(supervisor.next_event().record["pid"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_killed_with_9_takes_children_and_what_they_have_started_along(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _LAUNCHER, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
    assert launcher.returncode == -signal.SIGKILL
    _assert_ends(pid)


def test_several_runs_in_one_process_leave_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    def run() -> None:
        with Supervisor(tmp_path, PEER_S) as supervisor:
            child = spawn(supervisor, "obedient")
            supervisor.next_event()
            child.tell("stop")

    run()
    before, children = settled_resources(), psutil.Process().children()
    for _ in range(5):
        run()
    assert settled_resources() == before
    assert psutil.Process().children() == children


def _assert_ends(pid: int) -> None:
    """Within moments; a zombie that nobody has reaped yet has ended too."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        deadline = time.monotonic() + 5
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"{process} still runs"
            time.sleep(0.02)
