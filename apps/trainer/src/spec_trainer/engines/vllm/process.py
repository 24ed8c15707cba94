"""VllmProcess: our end of the process that vLLM lives in (``host_process.py``)."""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spec_core.errors import DeadlineExceeded, EngineError, PeerLost
from spec_core.resource import Resource
from spec_trainer.launch.control import ControlChannel
from spec_trainer.launch.guardian import Guardian, end_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from spec_trainer.launch.control import Record

log = logging.getLogger(__name__)

_HOST = "spec_trainer.engines.vllm.host_process"
_GRACE_S = 10.0
"""Between asking the process to end and killing it."""
_SETTLE_S = 3.0
"""For the cause of a death to be known after its first sign."""
_LAST_LINES = 400
_LONGEST_FOLDER = 107 - len("/") - 36
"""A socket's path has 107 characters at most, and vLLM's sockets are called by a UUID."""
_CAUSE = re.compile(r"\b([A-Z]\w*(?:Error|Exception): .+)$")
_POINTER = re.compile("Engine core initialization failed|EngineCore encountered an issue|exit code")
"""What says that something has failed, but not of what; vLLM's engine core has logged that before."""


class VllmProcess(Resource):
    """``run`` and ``counters`` may be called from any thread. Construct it in a thread that outlives it: the process
    ends with that thread (``die_with``). Its group is ended when this process dies, whatever it dies of."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], peer_s: float) -> None:
        """``environment``: in full, but for the folder of the sockets between vLLM's processes."""
        self._peer_s = peer_s
        self._keys = itertools.count()
        self._pending: dict[int, Future[Record]] = {}
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._failure: EngineError | None = None
        self._told: str | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._heard_s = time.monotonic()
        self._sockets = _socket_folder()
        self._guardian = Guardian().__enter__()
        self._spawn({**environment, "VLLM_RPC_BASE_PATH": self._sockets.name})
        self._channel.send("order", arguments=dict(arguments), peer_s=peer_s)
        self._threads = [
            threading.Thread(target=target, name=f"vllm {target.__name__.strip('_')}", daemon=True)
            for target in (self._listen, self._copy_log, self._await_end)
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self, start_s: float) -> None:
        """Raises EngineError with vLLM's own reason if it does not start."""
        if not self._ready.wait(start_s):
            raise DeadlineExceeded(f"vLLM was not ready within timeouts.start_s={start_s} s")
        if self._failure is not None:
            raise self._failure
        # Every socket is connected by now; gone here, its file does not outlive a process that is killed.
        self._sockets.cleanup()

    def run(self, token_ids: Iterable[int], sampling: Mapping[str, Any]) -> Future[Record]:
        """One request; the answer holds ``token_ids`` and ``gaps``."""
        return self._ask("run", token_ids=list(token_ids), sampling=dict(sampling))

    def counters(self) -> Record:
        try:
            return self._ask("counters").result(self._peer_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"vLLM told no counters within timeouts.peer_s={self._peer_s} s"
            ) from error

    def health(self) -> None:
        """Raises EngineError where vLLM has ended, or its engine core has not answered for ``peer_s``."""
        if self._failure is not None:
            raise self._failure
        if self._ready.is_set() and time.monotonic() - self._heard_s > self._peer_s:
            raise EngineError(f"vLLM's engine core has been silent for timeouts.peer_s={self._peer_s} s")

    def death(self) -> EngineError | None:
        """Why the process has ended, or is about to; None if it has not."""
        self._ended.wait(_SETTLE_S)
        return self._failure

    def close(self) -> None:
        """Idempotent; what runs ends with EngineError."""
        self._end(EngineError("the vllm engine was closed"))
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        end_group(self._process.pid)
        self._process.wait()
        for thread in self._threads:
            thread.join()
        self._guardian.__exit__(None, None, None)
        self._sockets.cleanup()

    def _spawn(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._channel = ControlChannel(ours, self._peer_s)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _HOST, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._guardian.guard(self._process.pid)

    def _ask(self, kind: str, **fields: Any) -> Future[Record]:
        answer: Future[Record] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            key = next(self._keys)
            self._pending[key] = answer
        with suppress(PeerLost):  # the future hears of it, with the cause
            self._channel.send(kind, key=key, **fields)
        return answer

    def _listen(self) -> None:
        for record in self._channel.records():
            self._heard_s = time.monotonic()
            if record["kind"] == "ready":
                self._ready.set()
            elif record["kind"] == "failed":
                self._told = record["message"]
            elif record["kind"] != "alive":
                self._answer(record)

    def _answer(self, record: Record) -> None:
        with self._lock:
            future = self._pending.pop(record["key"], None)
        if future is None:
            return
        if record["kind"] == "done":
            future.set_result(record)
        else:
            future.set_exception(EngineError(f"vLLM refused a request: {record['message']}"))

    def _copy_log(self) -> None:
        """vLLM's output becomes records of our log: in a run, lines of the engine's own log file."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                log.info("%s", text)

    def _await_end(self) -> None:
        code = self._process.wait()
        end_group(self._process.pid)  # what it has started holds its output open
        listening, logging_, _ = self._threads
        listening.join()
        logging_.join()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        failure = self._explained(self._told or f"vLLM's process {how}")
        self._end(EngineError(failure if self._ready.is_set() else f"vLLM did not start: {failure}"))

    def _end(self, failure: EngineError) -> None:
        with self._lock:
            self._failure = self._failure or failure
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(self._failure)
        self._ended.set()
        self._ready.set()

    def _explained(self, message: str) -> str:
        """With the last error that vLLM's processes have logged, where the message only points there."""
        found = (_CAUSE.search(line) for line in self._last_lines)
        causes = [match[1] for match in found if match and not _POINTER.search(match[1])]
        if not causes or not _POINTER.search(message):
            return message
        return f"{message}: {causes[-1]}" if "exit code" in message else causes[-1]


def _socket_folder() -> tempfile.TemporaryDirectory[str]:
    parent, prefix = tempfile.gettempdir(), "spec-vllm-"
    fits = len(f"{parent}/{prefix}") + 8 <= _LONGEST_FOLDER  # tempfile adds 8 characters
    return tempfile.TemporaryDirectory(
        prefix=prefix, dir=parent if fits else "/tmp", ignore_cleanup_errors=True
    )
