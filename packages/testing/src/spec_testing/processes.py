"""Run a function as N ranks, each in its own process, with a time limit and faults at named points.

::

    def member(me: Rank, build: Callable[[int], Thing]) -> int: ...

    results = run_ranks(member, 2, build)
    outcomes = watch_ranks(member, 2, build, faults={(1, "before send"): Fault.KILL})

Functions and classes are sent to the child processes by name, so they must be defined at the top level of a module.
A test module that no import statement would find works, too. Ranks that still run are killed when the call ends or
the test process dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from spec_testing.file_pickler import dumps
from spec_testing.limits import patient

_SUITES = ("process_group_suite", "strategy_suite", "transport_suite", "weight_transport_suite")
PRELOADED = (
    __name__,
    *("torch", "torch.distributed.tensor", "torch._dynamo"),
    *(f"spec_testing.{suite}" for suite in _SUITES),
)
"""Modules that the fork server imports before it forks ranks. None of them initializes a device."""
LIMIT_S = patient(120.0)
"""Longest time, in seconds, that the ranks of a test may take. Only a test that hangs takes so long."""
AFTERMATH_S = patient(1.0)
"""Time, in seconds, for which ``run_ranks`` waits for the other ranks after one has failed."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2) that sets the signal that a process gets when its parent dies."""


class Fault(enum.Enum):
    """A fault that is injected into a rank when it reaches a named point."""

    KILL = signal.SIGKILL
    STOP = signal.SIGSTOP


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank ended: with a value, with an error, or not at all (killed or stopped by a fault)."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""


class Rank:
    """Argument of a rank's function: the rank's number, and its connection to the test."""

    def __init__(self, rank: int, world_size: int, line: Connection) -> None:
        """Store this rank's number and its connection to the test."""
        self.rank = rank
        self.world_size = world_size
        self._line = line
        self._published: deque[Any] = deque()

    def reach(self, point: str) -> None:
        """Mark a named point in the rank's function.

        If the test has planned a fault for this point, the fault happens now.
        """
        self._line.send(("reach", point))
        while (message := self._line.recv())[0] != "go":
            self._published.append(message[1])

    def publish(self, value: Any) -> None:
        """Send a value to all other ranks, which get it from ``receive``."""
        self._line.send(("publish", value))

    def receive(self) -> Any:
        """Wait for the next value that another rank has published, and return it."""
        return self._published.popleft() if self._published else self._line.recv()[1]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = LIMIT_S,
    in_process: bool = False,
) -> list[Any]:
    """Run ``function(rank, *args)`` on every rank and return the results in rank order.

    If ranks fail, the test fails with the traceback of the first of them. ``in_process``: run ranks as threads of
    this process instead, for implementations that work within one process.
    """
    crew = (
        _Threads(function, args, world_size)
        if in_process
        else _Processes((function, args), world_size, timeout_s)
    )
    with crew:
        outcomes = crew.outcomes({}, timeout_s, aftermath_s=AFTERMATH_S)
    for outcome in outcomes:
        if outcome.error is not None:
            raise AssertionError(f"rank {outcome.rank} failed:\n{outcome.trace}") from outcome.error
    return [outcome.value for outcome in outcomes]


def watch_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = LIMIT_S,
    faults: Mapping[tuple[int, str], Fault] | None = None,
) -> list[Outcome]:
    """Run ``function`` on every rank with faults, and return how each rank ended.

    ``faults``: (rank, point) -> fault. The test fails if a rank without a fault dies or still runs after
    ``timeout_s``.
    """
    with _Processes((function, args), world_size, timeout_s) as crew:
        return crew.outcomes(dict(faults or {}), timeout_s)


class _Crew:
    """Controls the ranks of one call of ``run_ranks`` or ``watch_ranks``, over a connection to each rank."""

    def __init__(self) -> None:
        self._lines: list[Connection] = []
        self._points: dict[int, str] = {}

    def outcomes(
        self, faults: dict[tuple[int, str], Fault], timeout_s: float, aftermath_s: float | None = None
    ) -> list[Outcome]:
        """Return how the ranks ended, in their order.

        ``aftermath_s``: after an error of a rank the others have only this time, and those that still run are left
        out; None if all must end.
        """
        deadline = time.monotonic() + timeout_s
        ended: dict[int, Outcome] = {}
        while pending := set(range(len(self._lines))) - set(ended):
            ready = wait([self._lines[rank] for rank in pending], max(0, deadline - time.monotonic()))
            if not ready and aftermath_s is not None and any(end.error is not None for end in ended.values()):
                break
            if not ready:
                where = {rank: self._points.get(rank, "start") for rank in sorted(pending)}
                failed = "".join(
                    f"\nrank {rank} had failed:\n{end.trace}" for rank, end in ended.items() if end.trace
                )
                raise AssertionError(
                    f"after {timeout_s} s these ranks still ran, seen last at: {where}{failed}"
                )
            for rank in pending:
                if self._lines[rank] in ready and (outcome := self._attend(rank, faults)):
                    ended[rank] = outcome
                    if outcome.error is not None and aftermath_s is not None:
                        deadline = min(deadline, time.monotonic() + aftermath_s)
        return [ended[rank] for rank in sorted(ended)]

    def _attend(self, rank: int, faults: dict[tuple[int, str], Fault]) -> Outcome | None:
        try:
            kind, value = self._lines[rank].recv()
        except EOFError:
            point = self._points.get(rank, "start")
            raise AssertionError(f"rank {rank} died after {point!r}, {self._last_words(rank)}") from None
        if kind == "publish":
            self._spread(rank, value)
        elif kind == "reach":
            return self._reached(rank, value, faults.get((rank, value)))
        return value if kind == "ended" else None

    def _spread(self, rank: int, value: Any) -> None:
        for other, line in enumerate(self._lines):
            if other != rank:
                with contextlib.suppress(OSError):
                    line.send(("value", value))

    def _reached(self, rank: int, point: str, fault: Fault | None) -> Outcome | None:
        self._points[rank] = point
        if fault is None:
            self._lines[rank].send(("go", None))
            return None
        self._signal(rank, fault)
        return Outcome(rank=rank)

    def _signal(self, rank: int, fault: Fault) -> None:
        raise ValueError("ranks that share the test's process cannot be killed or stopped one by one")

    def _last_words(self, rank: int) -> str:
        return "its line was cut"

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        for line in self._lines:
            line.close()


class _Processes(_Crew):
    def __init__(self, work: Any, world_size: int, timeout_s: float) -> None:
        super().__init__()
        # Forked from a server that has only imported modules: as clean as a new process, and 20 times as fast.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._processes: list[ForkServerProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            task = (rank, world_size, theirs, dumps(work), timeout_s)
            process = context.Process(target=_run_process, args=task, daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def _signal(self, rank: int, fault: Fault) -> None:
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, fault.value)

    def _last_words(self, rank: int) -> str:
        self._processes[rank].join(5)
        return f"exit code {self._processes[rank].exitcode}"

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        super().__exit__(*exc)


class _Threads(_Crew):
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], world_size: int) -> None:
        super().__init__()
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()
            self._lines.append(ours)
            task = (Rank(rank, world_size, theirs), theirs, function, args)
            threading.Thread(target=_run_function, args=task, daemon=True).start()


def _run_process(rank: int, world_size: int, line: Connection, work: bytes, timeout_s: float) -> None:
    """Main function of a rank's process."""
    import torch

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.dump_traceback_later(max(1.0, timeout_s - 1), file=2)
    torch.set_num_threads(1)
    _run_function(Rank(rank, world_size, line), line, _call_packed, (work,))
    faulthandler.cancel_dump_traceback_later()


def _call_packed(me: Rank, work: bytes) -> Any:
    function, args = pickle.loads(work)
    return function(me, *args)


def _run_function(me: Rank, line: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        outcome = Outcome(rank=me.rank, value=function(me, *args))
    except BaseException as error:  # noqa: BLE001 (the top of a rank: the test gets every error, as it is)
        outcome = Outcome(rank=me.rank, error=_sendable(error), trace=traceback.format_exc())
    with contextlib.suppress(OSError):  # the test has given up on this rank
        line.send_bytes(dumps(("ended", outcome)))
    line.close()


def _sendable(error: BaseException) -> BaseException:
    """Return the error, or an AssertionError with its words if pickle does not find its class, as for pytest.fail."""
    try:
        dumps(error.with_traceback(None))
    except pickle.PicklingError:
        return AssertionError(str(error))
    return error
