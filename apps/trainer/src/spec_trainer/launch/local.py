"""A run of several processes: engine replicas and trainer ranks, whoever launches them.

This process trains nothing: it hands out capture batches, answers the ranks after every step, and watches. In place
of the ranks there may be another kind of process that takes features, such as a capture's writer.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_core.errors import DeadlineExceeded, RunError
from spec_trainer.data.store import saved_dataset
from spec_trainer.dispatch import Dispatcher
from spec_trainer.stop_request import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spec_core.launcher import Event, Launcher, Worker
    from spec_core.records import CaptureRequest, FeatureSchema
    from spec_trainer.progress import StepProgress
    from spec_trainer.run_spec import RunSpec
    from spec_trainer.stop_request import StopRequest

log = logging.getLogger(__name__)

_ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo"}
"""torch's own gloo groups would listen on the interface of the host's name; every rank is on this host. The caller's
environment wins."""


@dataclass(frozen=True)
class Program:
    """What a member of the run runs, and what it is called."""

    name: str
    entry: str


_ENGINE = Program("engine", "spec_trainer.launch.engine_process:run")
_TRAINER = Program("trainer", "spec_trainer.launch.trainer_process:run")


_LEAVING_S = 30.0
"""For processes that have nothing left to do to be gone: an engine ends processes of its own first."""


class RemoteEngine:
    """The launcher's end of an engine process: ``capture`` as the dispatcher calls it."""

    def __init__(self, child: Worker) -> None:
        self.child = child
        self._running: dict[int, Future[None]] = {}
        self._next = 0

    def capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> Future[None]:
        future: Future[None] = Future()
        self._running[self._next] = future
        self.child.tell(
            "capture",
            batch=self._next,
            requests=[[request.request_id, request.input_ids, request.destinations] for request in requests],
        )
        self._next += 1
        return future

    def captured(self, batch: int) -> None:
        self._running.pop(batch).set_result(None)


class LocalRun:
    """One run of several processes, from start to finish; every handler runs in the main thread."""

    def __init__(
        self, spec: RunSpec, supervisor: Launcher, stop: StopRequest, progress: StepProgress
    ) -> None:
        self._progress = progress
        self._spec = spec
        self._supervisor = supervisor
        self._stop = stop
        self._dispatcher: Dispatcher | None = None
        self._engines: dict[str, RemoteEngine] = {}
        self._ranks: dict[str, Worker] = {}
        self._ready: dict[str, dict[str, Any]] = {}
        self._turns: dict[str, int] = {}
        """``Member.turn`` of those that are not ready."""
        self._go_on: dict[int, bool] = {}
        self._interrupted: str | None = None

    def start(self, dataset: Path, taker: Program) -> None:
        """Starts every process; they load in parallel, and touch their devices in turns."""
        programs = {"engine": _ENGINE, "trainer": taker}
        common = {
            "config": self._spec.config.model_dump(mode="json"),
            "token": secrets.token_hex(16),
            "dataset": str(dataset),
        }
        spec = self._spec
        for member in spec.members():
            env = _ONE_HOST | os.environ | member.env(spec.backend)
            order = {
                "entry": programs[member.role].entry,
                "rank": member.index,
                "memory_fraction": member.memory_fraction,
                "waits": member.turn > 0,
            }
            name = f"{programs[member.role].name}-{member.index}"
            self._turns[name] = member.turn
            child = self._supervisor.spawn(name, order | common, env)
            if member.role == "engine":
                self._engines[name] = RemoteEngine(child)
            else:
                self._ranks[name] = child

    def run(self) -> None:
        """Until every process has ended. Raises the first failure of any, or Interrupted."""
        timeouts = self._spec.config.timeouts
        started = self._until(lambda: self._dispatcher is not None, time.monotonic() + timeouts.start_s)
        if self._stop.requested and self._dispatcher is None:
            raise Interrupted("interrupted before the first step; the same command starts again")
        if not started:
            missing = sorted({*self._engines, *self._ranks} - self._ready.keys())
            raise DeadlineExceeded(
                f"{', '.join(missing)} not ready within timeouts.start_s={timeouts.start_s} s"
            )
        self._until(lambda: all(child.finished for child in self._ranks.values()))
        for child in self._supervisor.children.values():
            child.finished = True
            child.tell("stop")
        self._supervisor.wait_all(max(timeouts.peer_s, _LEAVING_S))
        if self._interrupted is not None:
            raise Interrupted(self._interrupted)

    def _until(self, done: Callable[[], bool], deadline_s: float = math.inf) -> bool:
        """Handles events until ``done``; False if the deadline came first, or a request to stop before the start."""
        while not done():
            event = self._supervisor.next_event(deadline_s)
            if event is not None:
                self._handle(event)
            elif time.monotonic() >= deadline_s or (self._stop.requested and self._dispatcher is None):
                return False
        return True

    def _handle(self, event: Event) -> None:
        record = event.record
        assert record is not None
        handlers: dict[str, Callable[[Worker, dict[str, Any]], None]] = {
            "rendezvous": self._on_rendezvous,
            "ready": self._on_ready,
            "captured": self._on_captured,
            "released": self._on_released,
            "step": self._on_step,
            "progress": lambda child, record: self._progress.show(record["record"]),
            "interrupted": self._on_interrupted,
            "finished": lambda child, record: None,
        }
        handlers[record["kind"]](event.child, record)

    def _on_rendezvous(self, child: Worker, record: dict[str, Any]) -> None:
        for name, other in self._ranks.items():
            if name != child.name:
                other.tell("rendezvous", address=record["address"])

    def _on_ready(self, child: Worker, record: dict[str, Any]) -> None:
        self._ready[child.name] = record
        log.info("%s is ready", child.name)
        self._let_next_begin(self._turns.pop(child.name))
        if len(self._ready) == len(self._engines) + len(self._ranks):
            self._begin()

    def _let_next_begin(self, turn: int) -> None:
        """Those of the next turn, where nobody of ``turn`` is left to be ready."""
        following = min(self._turns.values(), default=turn)
        if following > turn:
            for name in [name for name, its_turn in self._turns.items() if its_turn == following]:
                self._supervisor.children[name].tell("begin")

    def _begin(self) -> None:
        spec = self._spec
        addresses = [self._ready[name]["address"] for name in self._ranks]
        done_steps = {self._ready[name]["done_steps"] for name in self._ranks}
        if len(done_steps) != 1:
            raise RunError(f"trainer ranks resumed at different steps: {sorted(done_steps)}")
        self._dispatcher = Dispatcher(
            spec.schedule, spec.schema, list(self._engines.values()), addresses, spec.window_bytes
        )
        for child in self._ranks.values():
            child.tell("start")
        log.info("every process is ready; %d steps are done", done := done_steps.pop())
        if self._engines:
            self._dispatcher.start(spec.schedule.items(done), failed=_never)

    def _on_captured(self, child: Worker, record: dict[str, Any]) -> None:
        self._engines[child.name].captured(record["batch"])

    def _on_released(self, child: Worker, record: dict[str, Any]) -> None:
        assert self._dispatcher is not None
        self._dispatcher.released(record["rank"], record["num_tokens"])

    def _on_step(self, child: Worker, record: dict[str, Any]) -> None:
        """The first rank to ask after a step decides for all: they stop after the same one."""
        go_on = self._go_on.setdefault(record["done"], not self._stop.requested)
        self._go_on.pop(record["done"] - 2, None)  # no rank is more than one step behind another
        child.tell("go_on", value=go_on)

    def _on_interrupted(self, child: Worker, record: dict[str, Any]) -> None:
        self._interrupted = record["message"]


def run_local(spec: RunSpec, stop: StopRequest, progress: StepProgress, taker: Program = _TRAINER) -> None:
    """Runs every process in its place until all have ended. ``taker``: what takes the features."""
    with (
        saved_dataset(spec.dataset, spec.directory.root) as dataset,
        spec.launcher_type(
            spec.directory.logs, spec.config.timeouts.peer_s, spec.backend.check_host
        ) as supervisor,
        progress,
    ):
        run = LocalRun(spec, supervisor, stop, progress)
        stop.on_request(supervisor.wake)
        run.start(dataset, taker)
        run.run()


def _never(error: BaseException) -> None:
    """An engine process reports its failures to the supervisor, not through its futures."""
    raise AssertionError(error)
