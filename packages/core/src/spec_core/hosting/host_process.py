"""EngineSubprocess: an engine's end of the process that the engine's program lives in.

vLLM and SGLang take over the process that they are in (stdout, logging, signal handlers, start method), and are
steered by environment variables. So each gets a process of its own, the host, with its environment.

Records to the host: first the order (``arguments``, ``peer_s``, ``device_type``), then what is asked, each with a
``key``. From it: ``ready``, ``alive``, for each key ``done`` or ``refused``, and ``failed`` when all is over.
Its end: ``host.py``.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
import threading
import time
from abc import abstractmethod
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import psutil

from spec_core.errors import DeadlineExceeded, EngineError, PeerLost
from spec_core.processes import Reaper, end_group, spawn
from spec_core.resource import Resource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from spec_core.engine import EngineContext
    from spec_core.processes import Record
    from spec_core.records import AcceptanceCounters, CaptureRequest, SamplingParams

log = logging.getLogger(__name__)

_SETTLE_S = 3.0
"""For the cause of a death to be known after its first sign."""
_KILL_S = 30.0
"""For killed processes to be gone: the driver frees their memory first."""
_LAST_LINES = 400
"""Of the program's log, searched for the cause of its death."""
_CAUSE = re.compile(r"\b((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)$")


class EngineSubprocess(Resource):
    """Any thread may call it. Construct it in a thread that outlives it: the process ends with that thread. All its
    processes are one group, which is ended when this process dies, whatever it dies of.

    A subclass says what the program is, how it is asked, and what it leaves behind.
    """

    program: ClassVar[str]
    """As its authors call it."""
    module: ClassVar[str]
    """What the process runs: the host's end."""
    our_part: ClassVar[str]
    """What of ours captures in it, and where that is found; for messages."""
    grace_s: ClassVar[float] = 0.0
    """Between telling the host to end and killing it."""

    def __init__(self, arguments: Mapping[str, Any], env: Mapping[str, str], context: EngineContext) -> None:
        """Begins to start the program with ``arguments``, in the environment ``env``."""
        self.ready: Record = {}
        """What the host said when it was ready."""
        self._context = context
        self._keys = itertools.count()
        self._pending: dict[int, Future[Record]] = {}
        self._lock = threading.Lock()
        self._started, self._ended = threading.Event(), threading.Event()
        self._failure: EngineError | None = None
        self._told: str | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._begun_s = self._heard_s = time.monotonic()
        log.info("starting %s: %s", self.program, arguments)
        self._reaper = Reaper()
        self._process, self._channel = spawn([self.module], env, subprocess.PIPE, context.peer_s)
        self._reaper.add(self._process.pid)
        with suppress(PeerLost):  # its end is told with the cause
            self._channel.send(
                "order",
                arguments=dict(arguments),
                peer_s=context.peer_s,
                device_type=context.backend.device_type,
            )
        self._threads = [
            threading.Thread(target=target, name=f"{self.program} {target.__name__.strip('_')}", daemon=True)
            for target in (self._listen, self._copy_log, self._await_end)
        ]
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def prefill(self, keys: Sequence[int], requests: Sequence[CaptureRequest]) -> Future[Record]:
        """Runs the requests so that the worker hands the states of each over under its key. The future is done when
        all ran, or has the EngineError of one that did not."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Record]:
        """Answers in order: ``ids`` and ``gaps``. Raises EngineError."""

    @abstractmethod
    def acceptance(self) -> AcceptanceCounters:
        """Since the start."""

    def wait_ready(self) -> None:
        """Raises EngineError with the program's own reason if it does not start, DeadlineExceeded where that takes
        longer than ``start_s``."""
        if not self._started.wait(self._context.start_s):
            raise DeadlineExceeded(
                f"{self.program} was not ready within timeouts.start_s={self._context.start_s} s"
            )
        if self._failure is not None:
            raise self._failure
        log.info("%s is up after %.0f s", self.program, time.monotonic() - self._begun_s)

    def ask(self, kind: str, **fields: Any) -> Future[Record]:
        """The future has the record ``done``, or EngineError."""
        answer: Future[Record] = Future()
        with self._lock:
            if self._failure is not None:
                answer.set_exception(self._failure)
                return answer
            key = next(self._keys)
            self._pending[key] = answer
        with suppress(PeerLost):  # the future hears of it, with the cause
            self._channel.send(kind, key=key, **fields)
        return answer

    def health(self) -> None:
        """Raises EngineError where the program has ended, or has not answered for ``peer_s``."""
        if self._failure is not None:
            raise self._failure
        if self._started.is_set() and time.monotonic() - self._heard_s > self._context.peer_s:
            raise EngineError(f"{self.program} has been silent for timeouts.peer_s={self._context.peer_s} s")

    def death(self) -> EngineError | None:
        """Why the program has ended, or is about to; None if it has not."""
        self._ended.wait(_SETTLE_S)
        return self._failure

    def close(self) -> None:
        """Idempotent. Every process of the program's is dead afterwards; what is pending ends with EngineError."""
        self._end(EngineError(f"{self.program} was closed"))
        group = _group(self._process.pid)
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self.grace_s)
        end_group(self._process.pid)
        self._process.wait()
        for thread in self._threads:
            thread.join()
        self._await_death(group)
        self._reaper.close()
        for file in self._left_files([process.pid for process in group]):
            file.unlink(missing_ok=True)

    def _left_files(self, pids: Sequence[int]) -> Iterable[Path]:
        """What the program's processes have made and left behind."""
        return ()

    def _listen(self) -> None:
        for record in self._channel.records():
            self._heard_s = time.monotonic()
            kind = record["kind"]
            if kind == "ready":
                self.ready = record
                self._started.set()
            elif kind == "failed":
                self._told = record["message"]
            elif kind != "alive":
                self._answer(record)

    def _answer(self, record: Record) -> None:
        with self._lock:
            future = self._pending.pop(record["key"], None)
        if future is None:
            return
        if record["kind"] == "done":
            future.set_result(record)
        else:
            future.set_exception(EngineError(f"{self.program} refused a request: {record['message']}"))

    def _copy_log(self) -> None:
        """The program's output becomes records of our log: in a run, lines of the engine's own log file."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                log.info("%s", text)

    def _await_end(self) -> None:
        code = self._process.wait()
        end_group(self._process.pid)  # what it has started holds its output open
        listening, copying, _ = self._threads
        listening.join()
        copying.join()
        how = f"its process was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"
        cause = self._explained(self._told or how)
        if not self._started.is_set():
            cause = f"{self.program} did not start: {cause}"
        elif self._told is None:
            cause = f"{self.program} has ended: {cause}"
        self._end(EngineError(cause))

    def _explained(self, message: str) -> str:
        """What the program has died of, where all that is known of it directly is ``message``."""
        causes = self._logged_errors()
        return causes[-1] if causes else message

    def _logged_errors(self) -> list[str]:
        return [found[1] for line in self._last_lines if (found := _CAUSE.search(line))]

    def _end(self, error: EngineError) -> None:
        """The first reason is kept."""
        with self._lock:
            self._failure = self._failure or error
            pending, self._pending = self._pending, {}
        self._ended.set()
        self._started.set()
        for future in pending.values():
            future.set_exception(self._failure)

    def _await_death(self, processes: Sequence[psutil.Process]) -> None:
        """A process whose new parent never asks for it stays as a zombie, which holds nothing."""
        deadline = time.monotonic() + _KILL_S
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    if time.monotonic() > deadline:
                        log.error("process %d of %s does not die", process.pid, self.program)
                        break
                    time.sleep(0.02)


def _group(leader: int) -> list[psutil.Process]:
    """Every process of the group; some may have lost their parent."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader:
                found.append(process)
    return found
