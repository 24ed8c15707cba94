"""EngineSubprocess starts the process of an engine's program, and exchanges messages with it.

vLLM and SGLang change the process in which they run (stdout, logging, signal handlers, start method), and are
configured by environment variables. So the program gets a separate process with its own environment.

This side sends ``order`` first (``arguments``, ``peer_s``, ``device_type``), then requests, each with a ``key``, and
``cancel`` with the key of a request that is not wanted any more. The process sends ``ready``, ``alive`` regularly,
``done`` or ``refused`` for each key that is not cancelled, and ``failed`` if the program ends. The process's side is
``subprocess_main``.
"""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil

from spec_core import EngineConfig, EngineContext
from spec_core.errors import DataError, DeadlineExceeded, EngineError, PeerLost
from spec_core.records import (
    AcceptanceCounters,
    CaptureRequest,
    Generation,
    GenerationRequest,
    SamplingParams,
)
from spec_core.resource import Resource
from spec_kit.hosting.capture_controller import CAPTURE_VARIABLE, CaptureController
from spec_kit.hosting.futures import then
from spec_kit.hosting.modes import CaptureMode, Fields, Mode
from spec_kit.hosting.program_log import logged_errors
from spec_processes import Reaper, end_group, ending, spawn

log = logging.getLogger(__name__)

_SETTLE_S = 3.0
"""Seconds to wait, after the first sign that the program has died, until the cause is known."""
_KILL_S = 30.0
"""Seconds to wait until killed processes are gone; the GPU driver first frees their memory."""
_CONNECTED_S = 10.0
"""Seconds to wait, once the program is ready, for the exporter's connection, which is made earlier."""
_AT_ONCE = 32
"""Number of requests that a program is taken to answer at once if its message ``ready`` does not say it."""
_LAST_LINES = 400
"""Number of last log lines of the program that are searched for the cause of its death."""


class EngineSubprocess(Resource):
    """The process of an engine's program, in one mode (``hosting.modes``) from construction to ``close``.

    A subclass defines the program, how requests reach it, and which files it leaves behind. Any thread may call it.
    The process is killed when the thread that constructed it ends, so that thread must live longer. The program's
    processes form one process group, which is killed if this process ends, even by ``kill -9``.
    """

    program: ClassVar[str]
    """The program's name in messages and logs."""
    module: ClassVar[str]
    """Name of the module that the process runs as ``__main__``; it uses ``EngineLink``."""
    extension: ClassVar[str]
    """Text for messages: what captures states inside the program, and where to look if it is missing."""
    grace_s: ClassVar[float] = 0.0
    """Seconds between closing the connection to the process and killing the process."""

    def __init__(
        self,
        config: EngineConfig,
        context: EngineContext,
        mode: Mode,
        arguments: Mapping[str, Any],
        env: Mapping[str, str],
    ) -> None:
        """Start the program with ``arguments`` and the environment ``env``; do not wait until it is ready."""
        self.mode = mode
        self.ready: Fields = {}
        """The fields of the program's message ``ready``; empty before it arrives."""
        self._context = context
        self._captures: CaptureController | None = None
        self._keys = itertools.count()
        self._pending: dict[int, Future[Fields]] = {}
        self._answers: set[Future[Generation]] = set()
        self._lock = threading.Lock()
        self._started, self._ended = threading.Event(), threading.Event()
        self._failure: EngineError | None = None
        self._reported: str | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._begun_s = self._received_s = time.monotonic()
        log.info("starting %s: %s", self.program, arguments)
        if isinstance(mode, CaptureMode):
            self._captures = CaptureController(context, mode.schema, config.send_timeout_s, self.death)
            env = {**env, CAPTURE_VARIABLE: self._captures.address}
        self._reaper = Reaper()
        self._process, self._channel = spawn([self.module], env, subprocess.PIPE, context.peer_s)
        self._reaper.add(self._process.pid)
        with suppress(PeerLost):  # the thread _await_end reports why the process ended
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
    def prefill(self, requests: Sequence[CaptureRequest]) -> Future[Fields]:
        """Send the requests to the program, whose worker exports the states of each request.

        The ``request_id`` and ``destinations`` of a request must reach ``FeatureExporter.export`` unchanged; these
        destinations are short names, which may be logged. The future completes when the program has run every
        request, or fails with the EngineError of a request that it did not run.
        """

    @abstractmethod
    def decode(self, request: GenerationRequest, sampling: SamplingParams) -> Future[Fields]:
        """Send a request to the program; the future returns the answer.

        An answer has the new token ``ids``, and ``gaps``: the difference of the two largest logits of each
        token, or empty. It has ``draft`` (version, digest) if a pushed draft may serve. If the program counts
        them, it also has ``accepted`` (how many verifications accepted 0, 1, … guesses), ``depths`` (the guess
        depth of each token), ``cached`` (cached tokens of the prompt), and ``times`` of the tokens in seconds.
        """

    @abstractmethod
    def acceptance(self) -> AcceptanceCounters:
        """Return the acceptance counters since the start of the program."""

    def wait_ready(self) -> None:
        """Wait until the program accepts requests.

        Raise EngineError with the program's error if it does not start, DeadlineExceeded after ``start_s`` seconds.
        """
        if not self._started.wait(self._context.start_s):
            raise DeadlineExceeded(
                f"{self.program} was not ready within timeouts.start_s={self._context.start_s} s"
            )
        if self._failure is not None:
            raise self._failure
        if self._captures is not None and not self._captures.wait_connected(_CONNECTED_S):
            raise EngineError(f"{self.program} started without {self.extension}")
        log.info("%s is up after %.0f s", self.program, time.monotonic() - self._begun_s)

    def capture(self, requests: Sequence[CaptureRequest], done: Future[None]) -> None:
        """Run the requests. ``done`` completes when all their features were handed to the transport."""
        assert self._captures is not None, "not in a CaptureMode"
        captures = self._captures

        def ran(run: Future[Fields]) -> None:
            if (error := run.exception()) is not None:
                captures.fail([request.request_id for request in requests], error)

        self.prefill(captures.register(requests, done)).add_done_callback(ran)

    def generate(self, request: GenerationRequest, sampling: SamplingParams) -> Future[Generation]:
        """Send a request to the program; the future returns the answer. Cancelling it ends the request."""
        answer = then(self.decode(request, sampling), lambda fields: _generation(fields, sampling))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return answer

    @property
    def at_once(self) -> int:
        """Number of requests that the running program answers at once: ``at_once`` of its message ``ready``."""
        return self.ready.get("at_once", _AT_ONCE)

    def ask(self, kind: str, **fields: Any) -> Future[Fields]:
        """Send a request to the process; the future returns the reply's fields, or raises EngineError.

        It raises DataError if the process has refused the request with a DataError. If it is cancelled, the
        process stops to work on the request.
        """
        answer: Future[Fields] = Future()
        with self._lock:
            if self._failure is not None:
                answer.set_exception(self._failure)
                return answer
            key = next(self._keys)
            self._pending[key] = answer
        try:
            with suppress(PeerLost):  # the future gets the cause
                self._channel.send(kind, key=key, **fields)
        except DeadlineExceeded as error:
            if self._take(key) is not None:
                answer.set_exception(error)
        answer.add_done_callback(lambda done: self._cancel(key) if done.cancelled() else None)
        return answer

    def _cancel(self, key: int) -> None:
        if self._take(key) is not None:
            with suppress(PeerLost, DeadlineExceeded):
                self._channel.send("cancel", key=key)

    def health(self) -> None:
        """Raise EngineError if the program has ended or is silent, or if pending captures are stuck."""
        if self._failure is not None:
            raise self._failure
        if self._started.is_set() and time.monotonic() - self._received_s > self._context.peer_s:
            raise EngineError(f"{self.program} has been silent for timeouts.peer_s={self._context.peer_s} s")
        if self._captures is not None:
            self._captures.health()

    def death(self) -> EngineError | None:
        """Return why the program has ended or is about to end, or None; it may wait 3 s for the cause."""
        self._ended.wait(_SETTLE_S)
        return self._failure

    def drain(self) -> None:
        """Wait until every capture and every answer in progress has ended."""
        if self._captures is not None:
            self._captures.drain()
        wait(list(self._answers))

    def close(self) -> None:
        """Kill every process of the program; pending requests fail with EngineError. Idempotent."""
        self._end(EngineError(f"{self.program} was closed"))
        group = _group(self._process.pid)
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self.grace_s)
        if self._process.poll() is None:  # else another group may have its number by now
            end_group(self._process.pid)
        self._process.wait()
        for thread in self._threads:
            thread.join()
        self._await_death(group)
        self._reaper.close()
        if self._captures is not None:
            self._captures.close()
        for file in self.left_files([process.pid for process in group]):
            file.unlink(missing_ok=True)

    def left_files(self, pids: Sequence[int]) -> Iterable[Path]:
        """Return the files that the program's processes have left behind."""
        return ()

    def explain(self, message: str) -> str:
        """Return the cause of the program's death: its last logged error, or else ``message``."""
        causes = self.logged_errors()
        return causes[-1] if causes else message

    def logged_errors(self) -> list[str]:
        """Return the errors in the last lines of the program's log."""
        return logged_errors(self._last_lines)

    def _listen(self) -> None:
        for message in self._channel.messages():
            self._received_s = time.monotonic()
            kind = message["kind"]
            if kind == "ready":
                self.ready = message
                self._started.set()
            elif kind == "failed":
                self._reported = message["message"]
            elif kind != "alive":
                self._answer(message)

    def _take(self, key: int) -> Future[Fields] | None:
        """Remove and return the pending future of a request; None if it has completed already."""
        with self._lock:
            return self._pending.pop(key, None)

    def _answer(self, message: Fields) -> None:
        future = self._take(message["key"])
        if future is None or not future.set_running_or_notify_cancel():
            return
        if message["kind"] == "done":
            future.set_result(message)
        elif message.get("is_data"):
            future.set_exception(DataError(message["message"]))
        else:
            future.set_exception(EngineError(f"{self.program} refused a request: {message['message']}"))

    def _copy_log(self) -> None:
        """Copy the program's output to this process's log; in a run this is the engine's log file."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                log.info("%s", text)

    def _await_end(self) -> None:
        code = self._process.wait()
        end_group(self._process.pid)  # its children keep its output open
        listening, copying, _ = self._threads
        listening.join()
        copying.join()
        cause = self.explain(self._reported or f"its process {ending(code)}")
        if not self._started.is_set():
            cause = f"{self.program} did not start: {cause}"
        elif self._reported is None:
            cause = f"{self.program} has ended: {cause}"
        self._end(EngineError(cause))

    def _end(self, error: EngineError) -> None:
        """Fail all pending requests. The first error is stored as the cause."""
        with self._lock:
            self._failure = self._failure or error
            pending, self._pending = self._pending, {}
        self._ended.set()
        self._started.set()
        for future in pending.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._failure)

    def _await_death(self, processes: Sequence[psutil.Process]) -> None:
        """Wait until the processes are dead. A zombie counts as dead, since it holds no resources."""
        deadline = time.monotonic() + _KILL_S
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    if time.monotonic() > deadline:
                        log.error("process %d of %s does not die", process.pid, self.program)
                        break
                    time.sleep(0.02)


def _generation(answer: Mapping[str, Any], sampling: SamplingParams) -> Generation:
    version, digest = answer.get("draft", (None, ""))
    return Generation(
        token_ids=tuple(answer["ids"])[: sampling.max_new_tokens],
        top2_margin=tuple(answer["gaps"]),
        guess_depths=tuple(answer.get("depths", ()))[: sampling.max_new_tokens],
        verifications=tuple(answer.get("accepted", ())),
        cached_tokens=answer.get("cached", 0),
        times_s=tuple(answer.get("times", ()))[: sampling.max_new_tokens],
        draft_version=version,
        draft_digest=digest,
    )


def _group(leader: int) -> list[psutil.Process]:
    """Return every process of the process group ``leader``, orphans included."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader:
                found.append(process)
    return found
