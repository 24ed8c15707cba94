"""LocalLauncher starts the workers of a run as child processes on this host."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from spec_core import (
    LaunchContext,
    Launcher,
    LauncherConfig,
    WorkerEnded,
    WorkerHandle,
    WorkerMessage,
    WorkerSpec,
)
from spec_core.errors import RunError
from spec_processes import (
    WORKER_MODULE,
    ChannelWorker,
    Reaper,
    WorkerInbox,
    ask_for_stacks,
    end_group,
    ending,
    spawn,
)

log = logging.getLogger(__name__)

_ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo"}
"""Environment of every worker, unless the user sets the variable: gloo uses loopback, because all workers are on
this host."""
_UNKILLABLE_S = 10.0
"""Longest wait, in seconds, for a killed process to end. A process that hangs inside a driver does not
end."""


@dataclass(eq=False, kw_only=True)
class LocalWorker(ChannelWorker):
    """A worker that is a child process of the launcher's process."""

    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    log: Path

    def ending(self) -> WorkerEnded:
        """Return how the process has ended, and kill the rest of its process group."""
        try:
            code = self.process.wait(_UNKILLABLE_S)
        except subprocess.TimeoutExpired:
            code = None
            how = "has closed its connection to the launcher and does not end"
        else:
            end_group(self.process.pid)
            how = ending(code)
        return WorkerEnded(self, f"{how}; see {self.log}", killed=code == -signal.SIGKILL)

    def has_exited(self) -> bool:
        """Return whether the worker's process has exited; one of its children may still hold its channel open."""
        return self.process.poll() is not None


class LocalLauncher(Launcher):
    """Starts each worker as a child process with a control channel."""

    name: ClassVar[str] = "local"
    api_version: ClassVar[int] = 1

    def __init__(self, config: LauncherConfig, context: LaunchContext) -> None:
        """Store the arguments; no process starts before ``start``."""
        super().__init__(config, context)
        self._inbox = WorkerInbox(context.peer_s)
        self._workers: list[LocalWorker] = []
        self._reaper: Reaper | None = None
        self._host = ExitStack()
        """Leaves ``Backend.prepare_host`` when it is closed."""

    def start(self, workers: Sequence[WorkerSpec]) -> Mapping[str, WorkerHandle]:
        """Start every worker; if one cannot be started, end the others and raise RunError (L2)."""
        try:
            self._host.enter_context(self.context.backend.prepare_host(self.context.placement))
            self._reaper = self._reaper or Reaper()
            return {spec.name: self._start(spec) for spec in workers}
        except BaseException:
            self.close()
            raise

    def replace(self, worker: WorkerHandle) -> WorkerHandle:
        """Kill what is left of the worker's process group, and start the worker again (L11)."""
        assert isinstance(worker, LocalWorker)
        if worker in self._workers:  # otherwise an earlier attempt has ended it
            self._inbox.forget(worker)
            worker.channel.close()
            _end(worker)
            self._workers.remove(worker)
            assert self._reaper is not None
            self._reaper.remove(worker.process.pid)
        return self._start(worker.spec)

    def receive(self, deadline_s: float = math.inf) -> WorkerMessage | WorkerEnded | None:
        """Wait for the next event of any worker and return it (L3)."""
        return self._inbox.receive(deadline_s)

    def wake(self) -> None:
        """Make the current or the next call of ``receive`` return None."""
        self._inbox.wake()

    def stop(self, grace_s: float) -> None:
        """Close the channels, wait, and kill what is left of each process group (L7)."""
        for worker in self._workers:
            worker.channel.close()
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            _end(worker, deadline)
        self._inbox.close()
        self._workers = []
        self._host.close()
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None

    def _start(self, spec: WorkerSpec) -> LocalWorker:
        assert self._reaper is not None
        env = {**_ONE_HOST, **os.environ, **spec.env(self.context.backend)}
        log_file = self.context.logs / f"{spec.name}.log"
        try:
            with log_file.open("ab") as output:
                process, channel = spawn([WORKER_MODULE, spec.name], env, output, self.context.peer_s)
        except OSError as error:
            raise RunError(f"{spec.name} cannot be started: {error}") from error
        worker = LocalWorker(spec.name, channel, spec=spec, process=process, log=log_file)
        self._workers.append(worker)
        self._reaper.add(process.pid)
        worker.begin(spec, self.context.peer_s)
        self._inbox.add(worker)
        return worker


def _end(worker: LocalWorker, deadline: float | None = None) -> None:
    """Kill the worker's process group, after waiting until ``deadline``, if given, for the worker to end.

    A worker that does not end by itself writes the stacks of its threads to its log before it is killed.
    """
    if worker.process.returncode is not None:
        return  # its group was killed, too; the id may now belong to another group
    if deadline is not None:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("%s did not end when asked and is killed; its log says where it was", worker.name)
    ask_for_stacks(worker.process)
    end_group(worker.process.pid)
    try:
        worker.process.wait(_UNKILLABLE_S)
    except subprocess.TimeoutExpired:
        pid = worker.process.pid
        log.error("%s (pid %d) does not die of kill -9: it waits in a driver", worker.name, pid)
