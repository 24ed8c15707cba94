"""Launcher ``local``: engine replicas and trainer ranks as processes of this host.

This process trains nothing: it hands out capture batches, answers the ranks after every step, and watches.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from spec_core.errors import DeadlineExceeded, RunError
from spec_trainer.data.store import saved_dataset
from spec_trainer.dispatch import Dispatcher
from spec_trainer.interrupted import Interrupted
from spec_trainer.launch.supervisor import Supervisor
from spec_trainer.progress import StepProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from spec_core.backend import Role
    from spec_core.records import CaptureRequest, FeatureSchema
    from spec_trainer.launch.supervisor import Child, Event
    from spec_trainer.resolve import ResolvedRun
    from spec_trainer.stop_request import StopRequest

log = logging.getLogger(__name__)


class RemoteEngine:
    """The launcher's end of an engine process: ``capture`` as the dispatcher calls it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._running: dict[int, Future[None]] = {}
        self._next = 0

    def capture(self, requests: Sequence[CaptureRequest], schema: FeatureSchema) -> Future[None]:
        future: Future[None] = Future()
        self._running[self._next] = future
        self.child.channel.send(
            "capture",
            batch=self._next,
            requests=[[request.sample_id, request.input_ids, request.destination] for request in requests],
        )
        self._next += 1
        return future

    def captured(self, batch: int) -> None:
        self._running.pop(batch).set_result(None)


class LocalRun:
    """One run of several processes, from start to finish; every handler runs in the main thread."""

    def __init__(
        self, plan: ResolvedRun, supervisor: Supervisor, stop: StopRequest, progress: StepProgress
    ) -> None:
        self._progress = progress
        self._plan = plan
        self._supervisor = supervisor
        self._stop = stop
        self._dispatcher: Dispatcher | None = None
        self._engines: dict[str, RemoteEngine] = {}
        self._ranks: dict[str, Child] = {}
        self._ready: dict[str, dict[str, Any]] = {}
        self._go_on: dict[int, bool] = {}
        self._interrupted: str | None = None

    def start(self, dataset: Path) -> None:
        """Starts every process; they load in parallel."""
        config = self._plan.config
        token = secrets.token_hex(16)
        common = {"config": config.model_dump(mode="json"), "token": token, "dataset": str(dataset)}
        for name, role, index in _members(self._plan):
            local_rank, share = _place(self._plan, role, index)
            env = self._plan.backend.child_env(role, share, local_rank)
            order = {"role": role, "rank": index, "local_rank": local_rank, **common}
            child = self._supervisor.spawn(name, order, env)
            if role == "engine":
                self._engines[name] = RemoteEngine(child)
            else:
                self._ranks[name] = child

    def run(self) -> None:
        """Until every rank has finished. Raises the first failure of any process, or Interrupted."""
        deadline = time.monotonic() + self._plan.config.timeouts.start_s
        while not all(child.finished for child in self._ranks.values()):
            event = self._supervisor.next_event()
            if event is not None:
                self._handle(event)
            if self._dispatcher is None and time.monotonic() > deadline:
                missing = sorted({*self._engines, *self._ranks} - self._ready.keys())
                raise DeadlineExceeded(
                    f"{', '.join(missing)} not ready within timeouts.start_s={self._plan.config.timeouts.start_s} s"
                )
        for engine in self._engines.values():
            engine.child.finished = True
            engine.child.channel.send("stop")
        if self._interrupted is not None:
            raise Interrupted(self._interrupted)

    def _handle(self, event: Event) -> None:
        record = event.record
        assert record is not None
        handlers: dict[str, Callable[[Child, dict[str, Any]], None]] = {
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

    def _on_rendezvous(self, child: Child, record: dict[str, Any]) -> None:
        for name, other in self._ranks.items():
            if name != child.name:
                other.channel.send("rendezvous", address=record["address"])

    def _on_ready(self, child: Child, record: dict[str, Any]) -> None:
        self._ready[child.name] = record
        log.info("%s is ready", child.name)
        if len(self._ready) == len(self._engines) + len(self._ranks):
            self._begin()

    def _begin(self) -> None:
        plan = self._plan
        addresses = [self._ready[name]["address"] for name in self._ranks]
        done_steps = {self._ready[name]["done_steps"] for name in self._ranks}
        if len(done_steps) != 1:
            raise RunError(f"trainer ranks resumed at different steps: {sorted(done_steps)}")
        self._dispatcher = Dispatcher(
            plan.work, plan.schema, list(self._engines.values()), addresses, plan.window_bytes
        )
        for child in self._ranks.values():
            child.channel.send("start")
        self._dispatcher.start(plan.work.items(done_steps.pop()), failed=_never)

    def _on_captured(self, child: Child, record: dict[str, Any]) -> None:
        self._engines[child.name].captured(record["batch"])

    def _on_released(self, child: Child, record: dict[str, Any]) -> None:
        assert self._dispatcher is not None
        self._dispatcher.released(record["rank"], record["num_tokens"])

    def _on_step(self, child: Child, record: dict[str, Any]) -> None:
        """The first rank to ask after a step decides for all: they stop after the same one."""
        go_on = self._go_on.setdefault(record["done"], not self._stop.requested)
        child.channel.send("go_on", value=go_on)

    def _on_interrupted(self, child: Child, record: dict[str, Any]) -> None:
        self._interrupted = record["message"]


def run_local(plan: ResolvedRun, stop: StopRequest) -> dict[str, Any]:
    """Trains with every process in its place; returns the summary that trainer rank 0 wrote."""
    timeouts = plan.config.timeouts
    with (
        saved_dataset(plan.dataset, plan.directory.root) as dataset,
        Supervisor(plan.directory.logs, timeouts.peer_s) as supervisor,
        StepProgress(plan.work.total_steps) as progress,
    ):
        stop.on_request(supervisor.wake)
        run = LocalRun(plan, supervisor, stop, progress)
        run.start(dataset)
        run.run()
        supervisor.wait_all(list(supervisor.children), timeouts.peer_s)
    return json.loads(plan.directory.summary.read_text())


def _members(plan: ResolvedRun) -> Iterator[tuple[str, Role, int]]:
    for index in range(plan.config.engine.replicas):
        yield f"engine-{index}", "engine", index
    for rank in range(plan.config.train.ranks):
        yield f"trainer-{rank}", "trainer", rank


def _place(plan: ResolvedRun, role: Role, index: int) -> tuple[int, float]:
    """(device, share of it). Colocated, engine i and rank i share device i; disaggregated, engines come first and
    ranks after them, around the host's devices."""
    placement = plan.config.placement
    devices = plan.backend.capabilities().num_devices
    if placement.kind == "colocated":
        fraction = placement.engine_fraction if role == "engine" else placement.trainer_fraction
        return index % devices, fraction or 0.5
    position = index if role == "engine" else plan.config.engine.replicas + index
    members = plan.config.engine.replicas + plan.config.train.ranks
    return position % devices, min(1.0, devices / members)


def _never(error: BaseException) -> None:
    """An engine process reports its failures to the supervisor, not through its futures."""
    raise AssertionError(error)
