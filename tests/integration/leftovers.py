"""Processes, sockets and memory that a run holds while it lives, and must not leave behind."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .launching import Run


@dataclass(frozen=True, kw_only=True)
class Belongings:
    """Belongings of a run on this machine, which it must not leave behind."""

    ports: frozenset[int]
    unix_names: frozenset[str]
    segments: frozenset[str]

    def left(self) -> list[str]:
        """Those that still exist."""
        everyone = psutil.net_connections("tcp")
        ports = {c.laddr.port for c in everyone if c.status == psutil.CONN_LISTEN}
        names = set(Path("/proc/net/unix").read_text().split())
        segments = {str(file) for file in Path("/dev/shm").iterdir()}
        found = [*(self.ports & ports), *(self.unix_names & names), *(self.segments & segments)]
        return [str(one) for one in found]


def belongings(run: Run) -> Belongings:
    listening: list[Any] = []
    names: list[str] = []
    mapped: list[str] = []
    for process in run.processes():
        with suppress(psutil.Error):  # it has just ended
            listening += [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            names += [c.laddr for c in process.net_connections("unix") if _is_reachable(c.laddr)]
            mapped += [m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")]
    return Belongings(
        ports=frozenset(address.port for address in listening),
        unix_names=frozenset(names),
        segments=frozenset(mapped),
    )


def _is_reachable(unix_name: str) -> bool:
    """Return whether others can connect by the name: gloo's replaced sockets have the name of a removed file."""
    return unix_name.startswith("@") or Path(unix_name).is_socket()


EXTRA_S = 15
"""Seconds that a run may take beyond ``timeouts.peer_s``."""


def assert_fails(run: Run, held: Belongings, *words: str, within_s: float) -> None:
    """From now on; ``words`` are in the one line that it ends with."""
    assert run.wait(within_s) == 1, run.story()
    errors = [line for line in run.errors.read_text().splitlines() if "error: " in line]
    assert errors == [run.last_line()], run.story()
    for word in words:
        assert word in run.last_line(), run.story()
    assert "Traceback" not in run.errors.read_text()
    assert_nothing_left(run, held)


def assert_nothing_left(run: Run, held: Belongings, within_s: float = 5.0) -> None:
    """The kernel may need a moment after the last signal."""
    deadline = time.monotonic() + within_s
    while (run.processes() or held.left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not run.processes(), run.processes()
    assert not held.left(), held.left()
