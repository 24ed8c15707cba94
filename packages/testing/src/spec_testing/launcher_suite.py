"""LauncherSuite tests the contract of spec_core.launcher (L1–L11) with real processes.

::

    class TestMyLauncher(LauncherSuite):
        @pytest.fixture
        def launcher_type(self) -> type[Launcher]:
            return MyLauncher

The functions that the workers run are in ``toy_workers``. Every wait has a limit (``PATIENCE_S``), and every
launcher is closed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import psutil
import pytest

from spec_core import Backend, Launcher, WorkerEnded, WorkerMessage, WorkerSpec
from spec_core.errors import DeadlineExceeded, RunError
from spec_testing.conformance import ConformanceSuite, import_without_torch
from spec_testing.launcher_bench import (
    PATIENCE_S,
    PEER_S,
    assert_soon,
    construct,
    is_running,
    limit,
    message,
    none_is_running,
    received,
    toy,
)
from spec_testing.prepared_backend import PreparedBackend, PreparedConfig

_SETTLE_S = 1.0
"""Seconds to wait in order to check that nothing happens."""
_KILLED_LAUNCHER = """
import importlib, os, pathlib, signal, sys
from spec_testing import launcher_bench as bench

module, name, logs = sys.argv[1:]
launcher_type = getattr(importlib.import_module(module), name)
launcher = bench.construct(launcher_type, pathlib.Path(logs))
launcher.start([bench.toy("stubborn")])
print(*bench.message(launcher)["pids"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class _Unplaceable(WorkerSpec):
    """A WorkerSpec whose ``env`` raises, so that the worker cannot be started."""

    def env(self, backend: Backend, local_rank: int | None = None) -> Mapping[str, str]:
        raise RunError("planted")


class LauncherSuite(ConformanceSuite):
    """Tests of a launcher.

    A subclass must define the fixture ``launcher_type``, which returns the plugin's class.
    """

    @pytest.fixture
    def launcher_type(self) -> type[Launcher]:
        """Return the class under test."""
        raise pytest.UsageError(
            "a LauncherSuite needs a fixture 'launcher_type' that returns the plugin's class"
        )

    @pytest.fixture
    def launcher(self, launcher_type: type[Launcher], tmp_path: Path) -> Iterator[Launcher]:
        """Yield a launcher that has started nothing."""
        with construct(launcher_type, tmp_path) as launcher:
            yield launcher

    def test_imports_without_torch(self, launcher_type: type[Launcher]) -> None:
        """The entry-point module imports without torch."""
        import_without_torch(launcher_type)

    def test_l1_nothing_is_started_before_start(self, launcher_type: type[Launcher], tmp_path: Path) -> None:
        """L1: ``__init__``, ``num_devices``, ``check``, ``hosts``, ``close`` create no process and no file."""
        before = set(psutil.Process().children(recursive=True))
        with construct(launcher_type, tmp_path / "missing") as launcher:
            assert launcher.num_devices() >= 1
            launcher.check([toy("echo")])
            assert set(launcher.hosts([toy("echo")])) == {"toy-0"}
            assert set(psutil.Process().children(recursive=True)) == before
        assert list(tmp_path.iterdir()) == []

    def test_l2_a_worker_is_a_process_with_its_arguments_and_environment(self, launcher: Launcher) -> None:
        """L2: workers have handles by name, and run in the main thread of processes with their environment."""
        wanted = toy("echo").env(launcher.context.backend)
        assert wanted, "the reference backend asks for something in the environment"
        arguments = {"variables": list(wanted), "list": [1, 2.5, None, "é"]}
        handles = launcher.start([toy("echo", "one-0", **arguments), toy("echo", "one-1", **arguments)])
        assert {name: handle.name for name, handle in handles.items()} == {"one-0": "one-0", "one-1": "one-1"}
        found = [message(launcher), message(launcher)]
        assert len({os.getpid(), *(one["pid"] for one in found)}) == 3
        for one in found:
            assert one["in_main_thread"]
            assert one["niceness"] == os.nice(0)
            assert one["environment"] == wanted
            assert one["arguments"] == arguments

    def test_l2_all_are_started_or_none(self, launcher: Launcher, tmp_path: Path) -> None:
        """L2: if the second worker cannot be started, the first does not run either."""
        second = _Unplaceable(name="b-1", entry=toy("echo").entry, arguments={}, role="engine")
        with pytest.raises(RunError, match="planted"):
            launcher.start([toy("leave_pid", "b-0", file=str(tmp_path / "pid")), second])
        time.sleep(_SETTLE_S)
        if (tmp_path / "pid").exists():
            assert not is_running(int((tmp_path / "pid").read_text()))

    @pytest.mark.parametrize(
        ("how", "killed"),
        [("return", False), ("raise", False), ("exit", False), ("SIGABRT", False), ("SIGKILL", True)],
    )
    def test_l3_messages_in_order_and_then_one_end(self, launcher: Launcher, how: str, killed: bool) -> None:
        """L3: 100 messages in order, then exactly one WorkerEnded, which says whether the worker was killed."""
        worker = launcher.start([toy("count_and_end", how=how)])["toy-0"]
        assert [message(launcher)["number"] for _ in range(100)] == list(range(100))
        ended = received(launcher)
        assert isinstance(ended, WorkerEnded)
        assert (ended.worker, ended.killed) == (worker, killed)
        assert ended.how
        worker.send({"to": "nobody"})
        assert launcher.receive(time.monotonic() + _SETTLE_S) is None

    def test_l3_an_entry_that_does_not_exist_is_an_end(self, launcher: Launcher) -> None:
        """L3: a worker whose entry cannot be imported ends with a WorkerEnded like any other worker."""
        launcher.start([toy("nothing")])
        assert isinstance(received(launcher), WorkerEnded)

    def test_receive_is_woken_and_has_a_deadline(self, launcher: Launcher) -> None:
        """``receive`` returns None at its deadline, not before, and at once after ``wake``."""
        launcher.start([toy("echo")])
        message(launcher)
        start = time.monotonic()
        assert launcher.receive(start + 0.3) is None
        assert 0.3 <= time.monotonic() - start < PATIENCE_S
        launcher.wake()
        start = time.monotonic()
        assert launcher.receive(start + PATIENCE_S) is None
        assert time.monotonic() - start < PATIENCE_S / 2

    def test_l4_a_stopped_worker_counts_as_killed(self, launcher: Launcher) -> None:
        """L4: a watched worker that is stopped (SIGSTOP) counts as ended, although its process still exists."""
        worker = launcher.start([toy("echo")])["toy-0"]
        process = psutil.Process(message(launcher)["pid"])
        worker.watch()
        process.suspend()
        ended = received(launcher)
        assert isinstance(ended, WorkerEnded)
        assert (ended.worker, ended.killed) == (worker, True)

    def test_l4_who_computes_is_not_silent(self, launcher: Launcher) -> None:
        """L4: a watched worker need not send messages; a worker that is not watched may even be stopped."""
        handles = launcher.start([toy("echo", "busy-0"), toy("echo", "stopped-0")])
        for event in [received(launcher), received(launcher)]:
            assert isinstance(event, WorkerMessage)
            if event.worker is handles["busy-0"]:
                event.worker.watch()
            else:
                psutil.Process(event.message["pid"]).suspend()
        assert launcher.receive(time.monotonic() + 2.5 * PEER_S) is None

    def test_l5_messages_to_a_worker_keep_their_order(self, launcher: Launcher) -> None:
        """L5: a worker returns 100 messages, including a large one, in the order in which they were sent."""
        worker = launcher.start([toy("echo")])["toy-0"]
        message(launcher)
        sent = [{"number": number, "text": "x" * (number * 100)} for number in range(100)]
        for one in sent:
            worker.send(one)
        assert [message(launcher) for _ in sent] == sent

    def test_l5_sending_to_a_stopped_worker_ends_in_time(self, launcher: Launcher) -> None:
        """L5: ``send`` to a stopped worker raises DeadlineExceeded, which names the worker."""
        worker = launcher.start([toy("stubborn")])["toy-0"]
        psutil.Process(message(launcher)["pids"][0]).suspend()
        with limit(), pytest.raises(DeadlineExceeded, match="toy-0"):
            worker.send({"text": "x" * (16 << 20)})

    def test_l6_a_stopped_run_ends_the_messages(self, launcher: Launcher, tmp_path: Path) -> None:
        """L6: ``RunLink.receive`` returns None, ``RunLink.send`` raises PeerLost; the worker ends by itself."""
        launcher.start([toy("echo", ending=str(tmp_path / "ending"))])
        message(launcher)
        with limit():
            launcher.stop(PATIENCE_S)
        assert (tmp_path / "ending").read_text() == "PeerLost"

    def test_l6_workers_reach_each_other_by_their_addresses(self, launcher: Launcher) -> None:
        """L6: a worker can connect to another worker that listens at its ``RunLink.address``."""
        handles = launcher.start([toy("listen_for_peer", "listen-0"), toy("connect_to_peer", "connect-0")])
        handles["connect-0"].send(message(launcher))
        events = [received(launcher) for _ in range(3)]
        assert [event.message for event in events if isinstance(event, WorkerMessage)] == [
            {"received": "a word"}
        ]

    def test_l7_nothing_is_left(self, launcher: Launcher) -> None:
        """L7: ``stop`` kills a worker that does not end, and its children; ``stop`` may be called again."""
        launcher.start([toy("stubborn", "stubborn-0"), toy("echo", "echo-0")])
        found = [message(launcher), message(launcher)]
        pids = [pid for one in found for pid in one.get("pids", [one.get("pid")])]
        assert all(is_running(pid) for pid in pids)
        with limit():
            launcher.stop(0.5)
        assert_soon(partial(none_is_running, pids))
        launcher.stop(0.5)
        launcher.close()

    def test_l8_a_killed_launcher_leaves_nothing(self, launcher_type: type[Launcher], tmp_path: Path) -> None:
        """L8: if the launcher's process is killed (SIGKILL), its workers and their children end."""
        where = [launcher_type.__module__, launcher_type.__qualname__, str(tmp_path)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        words = [sys.executable, "-c", _KILLED_LAUNCHER, *where]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process, limit():
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
        assert process.returncode == -signal.SIGKILL
        assert len(pids) == 2
        assert_soon(partial(none_is_running, pids))

    def test_l9_output_is_kept(self, launcher: Launcher, tmp_path: Path) -> None:
        """L9: a worker's output is in its log file, or ``WorkerEnded.how`` says where it is."""
        launcher.start([toy("echo", "printer-0"), toy("count_and_end", "raiser-0", how="raise")])
        events = [received(launcher) for _ in range(102)]
        (ended,) = [event for event in events if isinstance(event, WorkerEnded)]
        launcher.stop(PATIENCE_S)
        if (tmp_path / "printer-0.log").exists():
            assert "a line of output" in (tmp_path / "printer-0.log").read_text()
            assert "ValueError: as the suite asked for" in (tmp_path / "raiser-0.log").read_text()
        else:
            assert "see " in ended.how

    def test_l10_a_host_is_prepared_while_workers_run_on_it(
        self, launcher_type: type[Launcher], tmp_path: Path
    ) -> None:
        """L10: workers run in ``prepare_host``; ``stop`` leaves it; ``check_hosts`` reports dead daemons."""
        notes = tmp_path / "notes"
        notes.mkdir()
        backend = PreparedBackend(PreparedConfig(name="prepared", notes=notes))
        with construct(launcher_type, tmp_path, backend) as launcher:
            assert list(notes.iterdir()) == []
            launcher.start([toy("echo", variables=["PREPARED"])])
            assert message(launcher)["environment"] == {"PREPARED": "disaggregated"}
            assert len(list(notes.iterdir())) == 1
            launcher.check_hosts()
            (notes / "died").touch()
            assert_soon(lambda: _check_fails(launcher))
        assert_soon(lambda: [note.name for note in notes.iterdir()] == ["died"])

    def test_l11_a_worker_is_replaced(self, launcher: Launcher) -> None:
        """L11: a worker is replaced twice.

        Nothing is left of the old worker, and other workers are not affected.
        """
        handles = launcher.start([toy("echo", "other-0"), toy("stubborn", "toy-0")])
        worker = handles["toy-0"]
        one, other = message(launcher), message(launcher)
        pids: list[int] = one.get("pids") or other["pids"]
        for fault in ("stop", "kill"):
            if fault == "stop":
                psutil.Process(pids[0]).suspend()
            else:
                psutil.Process(pids[0]).kill()
                assert isinstance(received(launcher), WorkerEnded)
            old = worker
            worker = launcher.replace(worker)
            assert (worker.name, worker is old) == ("toy-0", False)
            assert_soon(partial(none_is_running, pids))
            event = received(launcher)
            assert event.worker is worker
            assert isinstance(event, WorkerMessage)
            pids = event.message["pids"]
            old.send({"to": "nobody"})
        handles["other-0"].send({"still": "here"})
        assert message(launcher) == {"still": "here"}


def _check_fails(launcher: Launcher) -> bool:
    try:
        launcher.check_hosts()
    except RunError as error:
        return "as the suite asked for" in str(error)
    return False
