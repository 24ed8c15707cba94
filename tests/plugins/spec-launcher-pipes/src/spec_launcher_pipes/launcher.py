"""PipesLauncher: each worker is a child process with messages on its standard input and output."""

from __future__ import annotations

import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from spec_core import Launcher, LauncherConfig, WorkerEnded, WorkerHandle, WorkerMessage
from spec_core.errors import DeadlineExceeded, RunError
from spec_processes import Reaper, end_group, ending

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_core import LaunchContext, Message, WorkerSpec

_LOOK_S = 0.2
"""Seconds between looks at the watched workers."""


class PipesConfig(LauncherConfig):
    """Section ``launcher`` of a run that names this launcher: ``launcher.nice=5`` works on the command line."""

    nice: int = Field(0, ge=0, le=19)
    """Niceness of the workers."""


class PipeWorker(WorkerHandle):
    """A child process; the launcher writes to its standard input."""

    reader: threading.Thread

    def __init__(self, spec: WorkerSpec, process: subprocess.Popen[bytes], peer_s: float) -> None:
        self.name = spec.name
        self.spec = spec
        self.process = process
        self.watched = self.ended = False
        self.received_s = time.monotonic()
        self._peer_s = peer_s
        os.set_blocking(process.stdin.fileno(), False)

    def send(self, message: Message) -> None:
        """L5: give up once the pipe has been full for ``peer_s`` seconds; do nothing for a worker that has ended."""
        if self.process.stdin.closed:
            return
        pipe, line = self.process.stdin.fileno(), json.dumps(message).encode() + b"\n"
        while line:
            if not select.select([], [pipe], [], self._peer_s)[1]:
                raise DeadlineExceeded(f"{self.name} has read nothing for {self._peer_s} s")
            try:
                line = line[os.write(pipe, line) :]
            except BrokenPipeError:
                return

    def watch(self) -> None:
        """L4: a heartbeat that stays away is the worker's end from now on."""
        self.watched, self.received_s = True, time.monotonic()


class PipesLauncher(Launcher):
    """One thread for each worker reads its output into one queue."""

    name: ClassVar[str] = "pipes"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[LauncherConfig]] = PipesConfig

    def __init__(self, config: PipesConfig, context: LaunchContext) -> None:
        super().__init__(config, context)
        self._inbox: queue.SimpleQueue[tuple[PipeWorker, Message | None] | None] = queue.SimpleQueue()
        self._workers: list[PipeWorker] = []
        self._reaper: Reaper | None = None
        self._host = ExitStack()

    def start(self, workers: Sequence[WorkerSpec]) -> Mapping[str, WorkerHandle]:
        """L2, L10: prepare this host and start every worker; where one cannot be started, end the others."""
        self._reaper = self._reaper or Reaper()
        try:
            self._host.enter_context(self.context.backend.prepare_host(self.context.placement))
            return {spec.name: self._start(spec, self._reaper) for spec in workers}
        except BaseException:
            self.close()
            raise

    def _start(self, spec: WorkerSpec, reaper: Reaper) -> PipeWorker:
        env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **spec.env(self.context.backend)}
        words = ["nice", "-n", str(self.config.nice), sys.executable, "-m", "spec_launcher_pipes.worker"]
        try:
            with (self.context.logs / f"{spec.name}.log").open("ab") as log:
                process = subprocess.Popen(
                    [*words, spec.name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                )
        except OSError as error:
            raise RunError(f"{spec.name} cannot be started: {error}") from error
        reaper.add(process.pid)  # L8: it ends the whole process group if this process is killed
        worker = PipeWorker(spec, process, self.context.peer_s)
        self._workers.append(worker)
        worker.reader = threading.Thread(target=self._read, args=(worker,), daemon=True)
        worker.reader.start()
        worker.send(
            {"entry": spec.entry, "arguments": dict(spec.arguments), "beat_s": self.context.peer_s / 8}
        )
        return worker

    def _read(self, worker: PipeWorker) -> None:
        with worker.process.stdout as lines:
            for line in lines:
                worker.received_s = time.monotonic()
                if (message := json.loads(line)) is not None:  # null is a heartbeat
                    self._inbox.put((worker, message))
        worker.process.wait()
        self._inbox.put((worker, None))

    def receive(self, deadline_s: float = math.inf) -> WorkerMessage | WorkerEnded | None:
        """L3, L4: return what comes next; look for silent workers meanwhile."""
        while True:
            try:
                event = self._inbox.get(timeout=max(0.0, min(_LOOK_S, deadline_s - time.monotonic())))
            except queue.Empty:
                if (lost := self._silent()) is not None:
                    return lost
                if time.monotonic() >= deadline_s:
                    return None
                continue
            if event is None:
                return None
            worker, message = event
            if not worker.ended:
                return self._ending(worker) if message is None else WorkerMessage(worker, message)

    def _ending(self, worker: PipeWorker) -> WorkerEnded:
        worker.ended = True
        code = worker.process.returncode
        log = self.context.logs / f"{worker.name}.log"
        return WorkerEnded(worker, f"{ending(code)}; see {log}", killed=code == -signal.SIGKILL)

    def _silent(self) -> WorkerEnded | None:
        for worker in self._workers:
            silence_s = time.monotonic() - worker.received_s
            if worker.watched and not worker.ended and silence_s > self.context.peer_s:
                worker.ended = True
                return WorkerEnded(worker, f"has been silent for {silence_s:.0f} s", killed=True)
        return None

    def wake(self) -> None:
        """Make ``receive`` return None."""
        self._inbox.put(None)

    def replace(self, worker: WorkerHandle) -> WorkerHandle:
        """L11: kill the worker's process group, and start it again; nothing comes out of the inbox after its end."""
        worker.ended = True
        end_group(worker.process.pid)
        worker.process.stdin.close()
        worker.reader.join()
        self._workers = [other for other in self._workers if other is not worker]
        return self._start(worker.spec, self._reaper)

    def stop(self, grace_s: float) -> None:
        """L6, L7, L10: close the pipes, wait, kill what is left of each process group, leave the host."""
        for worker in self._workers:
            worker.process.stdin.close()
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            end_group(worker.process.pid)
            worker.reader.join()
        self._workers = []
        self._host.close()
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None
