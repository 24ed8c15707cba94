"""SglangServer: one running SGLang, seen from the engine: started, asked, watched and killed."""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from spec_core.errors import DeadlineExceeded, EngineError, PeerLost
from spec_core.resource import Resource
from spec_trainer.launch.control import ControlChannel
from spec_trainer.launch.guardian import Guardian, end_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_core.engine import Site
    from spec_trainer.launch.control import Record

log = logging.getLogger(__name__)

_HOST = "spec_trainer.engines.sglang.host"
_KILL_S = 30.0
"""For killed processes to be gone: the driver frees their memory first."""
_SETTLE_S = 3.0
"""For the cause of a death to be known after its first sign."""
_LAST_LINES = 100
"""Of SGLang's log, searched for the cause of its death."""
_CAUSE = re.compile(r"\b((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)$")


@dataclass(frozen=True, kw_only=True)
class Answer:
    ids: tuple[int, ...]
    gaps: tuple[float, ...] = ()
    accepted: tuple[int, ...] = ()
    """Verifications that accepted 0, 1, … draft tokens."""


class SglangServer(Resource):
    """Any thread may call it. Construct it in a thread that outlives it: the process ends with that thread
    (``die_with``). All its processes are one group, which is ended when this process dies, whatever it dies of."""

    def __init__(self, arguments: Mapping[str, Any], env: Mapping[str, str], site: Site) -> None:
        """Begins to start SGLang. ``arguments``: of its ``ServerArgs``; ``env``: over this process's environment."""
        self._site = site
        self._numbers = itertools.count()
        self._pending: dict[int, Future[list[Answer]]] = {}
        self._lock = threading.Lock()
        self._ready, self._ended = threading.Event(), threading.Event()
        self._failure: EngineError | None = None
        self._told: str | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._files: list[str] = []
        self._heard_s = time.monotonic()
        self._guardian = Guardian().__enter__()
        self._spawn(env)
        self._channel.send("order", arguments=dict(arguments), peer_s=site.peer_s)
        self._threads = [
            threading.Thread(target=target, name=f"sglang {target.__name__.strip('_')}", daemon=True)
            for target in (self._listen, self._copy_log, self._await_end)
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        """Raises EngineError where SGLang does not start, DeadlineExceeded where it takes longer than ``start_s``."""
        if not self._ready.wait(self._site.start_s):
            raise DeadlineExceeded(f"SGLang was not ready within timeouts.start_s={self._site.start_s} s")
        if self._failure is not None:
            raise self._failure

    def run(
        self,
        names: Sequence[str],
        ids: Sequence[Sequence[int]],
        sampling: Mapping[str, Any],
        *,
        gaps: bool = False,
    ) -> Future[list[Answer]]:
        """Starts a batch of requests. The future has their answers in order, or EngineError if one was refused."""
        future: Future[list[Answer]] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            batch = next(self._numbers)
            self._pending[batch] = future
        with suppress(PeerLost):  # the future hears of it, with the cause
            self._channel.send("run", batch=batch, names=names, ids=ids, sampling=dict(sampling), gaps=gaps)
        return future

    def health(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._ready.is_set() and time.monotonic() - self._heard_s > self._site.peer_s:
            raise EngineError(f"SGLang has been silent for timeouts.peer_s={self._site.peer_s} s")

    def death(self) -> EngineError | None:
        """Why SGLang has ended, or is about to; None if it has not."""
        self._ended.wait(_SETTLE_S)
        return self._failure

    def close(self) -> None:
        """Idempotent. Every process of SGLang's is dead afterwards; what is pending ends with EngineError."""
        self._end(EngineError("the sglang engine was closed"))
        group = _group(self._process.pid)
        self._channel.close()
        end_group(self._process.pid)
        self._process.wait()
        for thread in self._threads:
            thread.join()
        _await_death(group)
        self._guardian.__exit__(None, None, None)
        shared = [f for p in group for f in Path("/dev/shm").glob(f"sgl_shm_*_{p.pid}_*")]
        for file in [*self._files, *shared]:
            Path(file).unlink(missing_ok=True)

    def _spawn(self, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._channel = ControlChannel(ours, self._site.peer_s)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _HOST, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )
        self._guardian.guard(self._process.pid)

    def _listen(self) -> None:
        for record in self._channel.records():
            self._heard_s = time.monotonic()
            kind = record["kind"]
            if kind == "ready":
                self._files = record["files"]
                log.info("SGLang %s is ready", record["version"])
                self._ready.set()
            elif kind == "failed":
                self._told = f"{record['error']}: {record['message']}"
            elif kind != "alive":
                self._answer(record)

    def _answer(self, record: Record) -> None:
        with self._lock:
            future = self._pending.pop(record["batch"], None)
        if future is None:
            return
        if record["kind"] == "refused":
            future.set_exception(EngineError(f"SGLang refused a request: {record['message']}"))
            return
        future.set_result(
            [
                Answer(ids=tuple(a["ids"]), gaps=tuple(a["gaps"]), accepted=tuple(a["accepted"]))
                for a in record["answers"]
            ]
        )

    def _copy_log(self) -> None:
        """SGLang's output becomes records of our log: in a run, lines of the engine's own log file."""
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
        causes = [found[1] for line in self._last_lines if (found := _CAUSE.search(line))]
        cause = causes[-1] if causes else self._told or how
        what = "has ended" if self._ready.is_set() else "did not start"
        self._end(EngineError(f"SGLang {what}: {cause}"))

    def _end(self, error: EngineError) -> None:
        """The first reason is kept."""
        with self._lock:
            self._failure = self._failure or error
            pending, self._pending = list(self._pending.values()), {}
        self._ended.set()
        self._ready.set()
        for future in pending:
            future.set_exception(self._failure)


def _group(leader: int) -> list[psutil.Process]:
    """Every process of the group; some may have lost their parent."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader:
                found.append(process)
    return found


def _await_death(processes: Sequence[psutil.Process]) -> None:
    """A process whose new parent never asks for it stays as a zombie, which holds nothing."""
    deadline = time.monotonic() + _KILL_S
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > deadline:
                    log.error("process %d of SGLang does not die", process.pid)
                    break
                time.sleep(0.02)
