"""RunController: a run of several processes, engine replicas and trainer ranks, on any launcher.

The controller trains nothing. It hands out capture batches, answers the ranks after every step, and watches. A
capture has one writer in place of the ranks. In a run that decodes the workers stay from cycle to cycle.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core.errors import DeadlineExceeded, NoDevices, RunError
from spec_core.launcher import WorkerEnded, WorkerMessage
from spec_trainer.command_line.stop_request import Interrupted
from spec_trainer.controller import protocol
from spec_trainer.controller.dataset_copy import read_part
from spec_trainer.controller.failures import Failure, FailureReports
from spec_trainer.controller.remote_decoders import RemoteDecoders
from spec_trainer.controller.remote_engine import RemoteEngine
from spec_trainer.controller.replacements import Replacements
from spec_trainer.controller.worker_specs import DECODER, TRAINER, worker_specs
from spec_trainer.data.store import saved_dataset
from spec_trainer.run.dispatch import Dispatcher
from spec_trainer.run.log import RemoteRankFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spec_core.launcher import Launcher, WorkerHandle, WorkerSpec
    from spec_trainer.command_line.progress import StepProgress
    from spec_trainer.command_line.stop_request import StopRequest
    from spec_trainer.run.spec import RunSpec

log = logging.getLogger(__name__)

_LEAVING_S = 30.0
"""Least time for workers without work to end; an engine ends processes of its own first."""
_HOST_CHECK_S = 0.5
"""Seconds between looks at what the backend has started on the hosts."""
_ROOM_CHECK_S = 5.0
"""Seconds between looks for devices for an engine whose host is lost."""


class RunController:
    """One run, from the start of its workers to their end. Every handler runs in the calling thread."""

    def __init__(self, spec: RunSpec, launcher: Launcher, stop: StopRequest, progress: StepProgress) -> None:
        """Prepare the run of ``spec``; nothing starts before ``start``."""
        self._spec = spec
        self._launcher = launcher
        self._stop = stop
        self._progress = progress
        self._failures = FailureReports(launcher)
        self._dataset = Path()
        """Folder of the tokenised dataset."""
        self._rank_files = RemoteRankFiles(spec.directory.logs)
        self._dispatcher: Dispatcher | None = None
        self._workers: dict[str, WorkerHandle] = {}
        self._running: set[str] = set()
        """Workers that have not ended."""
        self._engines: dict[str, RemoteEngine] = {}
        self._decoders: dict[str, WorkerHandle] = {}
        self._ranks: dict[str, WorkerHandle] = {}
        self._ready: dict[str, protocol.Ready] = {}
        self._loading: dict[int, set[str]] = {}
        """``WorkerOrder.init_order`` -> its workers that are not ready."""
        self._waiting_for_begin: set[str] = set()
        """Workers that wait for Begin when they start."""
        self._starting: dict[str, float] = {}
        """Replaced engines that are not ready -> when they are to be."""
        self._waiting_for_devices: dict[str, float] = {}
        """Lost engines for which no host has devices -> when at least one engine is to be there again."""
        self._replacements = Replacements(
            self._engines, spec.config.engine.replacements, spec.directory.replacements
        )
        self._exported: tuple[WorkerHandle, protocol.Exported] | None = None
        """A draft that waits to be measured, and the rank that has exported it."""
        self._cycle: protocol.TrainCycle | None = None
        """The newest cycle of a run that decodes."""
        self._working: set[str] = set()
        """Ranks that have not finished."""
        self._proceed: dict[int, bool] = {}
        """Steps done -> the answer to every rank."""
        self._next_check_s = 0.0
        """When the hosts are to be looked at again."""
        self._next_room_check_s = 0.0
        """When devices are to be looked for again."""
        self._done_steps = 0
        self._interrupted: str | None = None
        self.decoder = RemoteDecoders(self._decoders, self._until, stop)
        """The workers that decode; only for ``work`` of ``run``."""

    def run(
        self, workers: Sequence[WorkerSpec], work: Callable[[RunController], object] | None = None
    ) -> None:
        """Start the workers, have them do ``work``, by default the whole schedule, and return when all have ended.

        Raise the failure that ends the run, or Interrupted.
        """
        interrupted: Interrupted | None = None
        with self._rank_files:
            self._start(workers)
            self._await_start()
            try:
                self._train(self._spec) if work is None else work(self)
            except Interrupted as stopped:
                interrupted = stopped
            self._stop_workers()
        if interrupted is not None:
            raise interrupted

    def train_measuring(self, measure: Callable[[int, Path], dict[str, Any]]) -> None:
        """Train the whole schedule; meanwhile ``measure`` each draft that rank 0 exports. Raise Interrupted.

        ``measure`` gets the number of steps and the folder, and returns fields of a step's record.
        """
        self._train(self._spec, measure)

    def train_cycle(self, part: RunSpec, number: int, notes: dict[str, Any]) -> float:
        """Train a cycle of a run that decodes; return the seconds that engines have captured for.

        ``notes`` are fields of the record of every step. Raise Interrupted.
        """
        self._until(lambda: not self._starting)
        steps = part.schedule.steps
        self._cycle = protocol.TrainCycle(
            number, (steps.start, steps.stop), part.config.train.resume_from, notes
        )
        self._loading = {0: set(self._ranks)}
        for name in (*self._engines, *self._ranks):
            self._workers[name].send(self._cycle.to_json())
        self._await_ready()
        return self._train(part)

    def _start(self, workers: Sequence[WorkerSpec]) -> None:
        """Start every worker; they load in parallel, and touch shared devices one after the other."""
        self._workers = dict(self._launcher.start(workers))
        self._running = set(self._workers)
        self._waiting_for_begin = {spec.name for spec in workers if spec.order["init_order"] > 0}
        for spec in workers:
            self._dataset = Path(spec.order["dataset"])
            worker = self._workers[spec.name]
            self._loading.setdefault(spec.order["init_order"], set()).add(spec.name)
            if spec.order["program"] == DECODER:
                self._decoders[spec.name] = worker
            elif spec.role == "engine":
                self._engines[spec.name] = RemoteEngine(worker)
            else:
                self._ranks[spec.name] = worker

    def _await_start(self) -> None:
        self._await_ready(lambda: self._stop.requested)
        if self._loading:
            raise Interrupted("interrupted before the first step; the same command starts again")

    def _await_ready(self, no_more: Callable[[], bool] = lambda: False) -> None:
        """Wait until every worker that is to say so is ready, or until ``no_more``."""
        start_s = self._spec.config.timeouts.start_s
        if not self._until(lambda: not self._loading or no_more(), time.monotonic() + start_s):
            missing = ", ".join(sorted(set[str]().union(*self._loading.values())))
            raise DeadlineExceeded(f"{missing} not ready within timeouts.start_s={start_s} s")

    def _train(self, spec: RunSpec, measure: Callable[[int, Path], dict[str, Any]] | None = None) -> float:
        """Train the schedule of ``spec``, for which every rank is ready; return the seconds of captures."""
        self._working = set(self._ranks)
        dispatcher = self._dispatch(spec)
        while self._working:
            self._until(lambda: not self._working or self._exported is not None)
            if self._exported is not None and measure is not None:
                (rank, draft), self._exported = self._exported, None
                figures = {} if self._stop.requested else measure(draft.version, Path(draft.folder))
                rank.send(protocol.Measured(figures).to_json())
        if self._interrupted is not None:
            raise Interrupted(self._interrupted)
        return dispatcher.busy_s

    def _until(self, done: Callable[[], bool], deadline_s: float = math.inf) -> bool:
        """Handle events until ``done``; return False at the deadline."""
        while not done():
            now = time.monotonic()
            if now >= self._next_check_s:
                self._launcher.check_hosts()
                self._check_starting()
                self._check_devices()
                self._next_check_s = now + _HOST_CHECK_S
            event = self._failures.receive(min(deadline_s, self._next_check_s))
            if event is not None:
                self._handle(event)
            elif time.monotonic() >= deadline_s:
                return False
        return True

    def _stop_workers(self) -> None:
        """Ask every worker to end and wait for that; a failure changes nothing any more."""
        for worker in self._workers.values():
            worker.send(protocol.Stop().to_json())
        limit_s = max(self._spec.config.timeouts.peer_s, _LEAVING_S)
        deadline = time.monotonic() + limit_s
        self._running -= self._starting.keys()  # they come too late to be of use; the launcher ends them
        while self._running:
            event = self._failures.receive(deadline)
            if isinstance(event, WorkerEnded):
                self._running.discard(event.worker.name)
            elif event is None and time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{', '.join(sorted(self._running))} did not end within {limit_s} s")

    def _handle(self, event: WorkerMessage | WorkerEnded) -> None:
        name = event.worker.name
        if event.worker is not self._workers[name] or name in self._waiting_for_devices:
            return  # it was lost after it had sent this
        if isinstance(event, WorkerEnded):
            self._running.discard(name)
        if (failure := self._failures.failure_in(event)) is not None:
            self._treat(self._failures.with_causes(failure))
        elif isinstance(event, WorkerMessage):
            self._handle_message(event.worker, protocol.from_json(event.message))

    def _treat(self, failures: Sequence[Failure]) -> None:
        """Replace the workers that have failed, until each is there or waits; end the run with the first error."""
        while failures:
            if self._dispatcher is None:  # it would fail again
                raise failures[0].error
            self._replacements.note(failures, self._done_steps)
            names = [failure.worker for failure in failures]
            for name in names:
                self._lose(name)
            failures = [refused for name in names if (refused := self._start_again(name)) is not None]

    def _lose(self, name: str) -> None:
        """Expect nothing more of an engine, and have others capture what it was given."""
        assert self._dispatcher is not None
        self._dispatcher.lost(self._number_of(name))
        self._running.discard(name)
        self._starting.pop(name, None)

    def _start_again(self, name: str) -> Failure | None:
        """Start a lost engine in another worker, now or once a host has devices for it; return why it cannot be."""
        try:
            worker = self._launcher.replace(self._workers[name])
        except NoDevices as error:
            self._wait_for_devices(name, error)
            return None
        except RunError as error:
            self._waiting_for_devices.pop(name, None)
            return Failure(name, error, 0)
        self._waiting_for_devices.pop(name, None)
        self._workers[name] = worker
        self._engines[name].replace(worker)
        self._failures.replaced(name)
        self._running.add(name)
        self._starting[name] = time.monotonic() + self._spec.config.timeouts.start_s
        if name in self._waiting_for_begin:
            worker.send(protocol.Begin().to_json())
        return None

    def _wait_for_devices(self, name: str, error: NoDevices) -> None:
        """Go on without an engine; raise ``error`` where it was the last one and none is back in time."""
        now, start_s = time.monotonic(), self._spec.config.timeouts.start_s
        if name not in self._waiting_for_devices:
            log.warning("%s; the run goes on without %s until a host has room", error, name)
            self._waiting_for_devices[name] = now + start_s
        self._next_room_check_s = now + _ROOM_CHECK_S
        waiting = self._waiting_for_devices
        if waiting.keys() == self._engines.keys() and now >= max(waiting.values()):
            raise RunError(
                f"{error} within timeouts.start_s={start_s} s, and no other engine is left"
            ) from error

    def _check_devices(self) -> None:
        """Start lost engines for which there are devices again."""
        if time.monotonic() >= self._next_room_check_s:
            names = list(self._waiting_for_devices)
            self._treat([refused for name in names if (refused := self._start_again(name)) is not None])

    def _number_of(self, engine: str) -> int:
        return list(self._engines).index(engine)

    def _check_starting(self) -> None:
        """Treat replaced engines that are not ready in time."""
        start_s = self._spec.config.timeouts.start_s
        for name in [name for name, limit in self._starting.items() if time.monotonic() >= limit]:
            late = DeadlineExceeded(f"{name} not ready within timeouts.start_s={start_s} s")
            self._treat([Failure(name, late, 0)])

    def _handle_message(self, worker: WorkerHandle, message: protocol.ControlMessage) -> None:
        match message:
            case protocol.DatasetWanted():
                worker.send(read_part(self._dataset, message).to_json())
            case protocol.Trained(rank, row):
                self._rank_files.write(rank, row)
            case protocol.RendezvousAddress():
                for name, rank in self._ranks.items():
                    if name != worker.name:
                        rank.send(message.to_json())
            case protocol.Ready():
                self._on_ready(worker, message)
            case protocol.Captured(batch):
                self._engines[worker.name].captured(batch)
            case protocol.Released(rank, request_ids):
                assert self._dispatcher is not None
                self._dispatcher.released(rank, *request_ids)
            case protocol.StepDone(steps):
                self._done_steps = steps
                assert self._dispatcher is not None
                proceed = protocol.Proceed(self._may_proceed(steps), self._dispatcher.busy_s)
                worker.send(proceed.to_json())
            case protocol.StepShown(record):
                self._progress.show(record)
            case protocol.Finished(interrupted):
                self._interrupted = self._interrupted or interrupted
                self._working.discard(worker.name)
                if not self._decoders:  # else there may be more cycles, or a measurement
                    self._failures.expect_end(worker.name)
            case protocol.Exported():
                self._exported = worker, message
            case protocol.Serving():
                self.decoder.serving(worker.name)
            case protocol.Generated():
                self.decoder.generated(worker.name, message)
            case _:
                raise RunError(f"{worker.name} sent {message}, which only the controller sends")

    def _on_ready(self, worker: WorkerHandle, message: protocol.Ready) -> None:
        worker.watch()
        self._ready[worker.name] = message
        log.info("%s is ready", worker.name)
        if self._starting.pop(worker.name, None) is not None:
            assert self._dispatcher is not None
            if self._cycle is not None:
                worker.send(self._cycle.to_json())
            self._dispatcher.regained(self._number_of(worker.name))
            return
        self._loading[done := min(self._loading)].remove(worker.name)
        if not self._loading[done]:
            del self._loading[done]
            self._begin_next()

    def _begin_next(self) -> None:
        """Let the workers that come next touch their devices."""
        for name in self._loading[min(self._loading)] if self._loading else ():
            self._workers[name].send(protocol.Begin().to_json())

    def _dispatch(self, spec: RunSpec) -> Dispatcher:
        """Let every rank start, and begin the captures for what it is to train."""
        addresses = [self._ready[name].address or "" for name in self._ranks]
        done_steps = {self._ready[name].done_steps for name in self._ranks}
        if len(done_steps) != 1:
            raise RunError(f"trainer ranks resumed at different steps: {sorted(done_steps)}")
        self._dispatcher = Dispatcher(
            spec.schedule, spec.schema, list(self._engines.values()), addresses, spec.window_bytes
        )
        for name in self._waiting_for_devices:
            self._dispatcher.lost(self._number_of(name))
        for rank in self._ranks.values():
            rank.send(protocol.Start().to_json())
        self._done_steps = done_steps.pop()
        log.info("every process is ready; %d steps are done", self._done_steps)
        if self._engines:
            self._dispatcher.start(spec.schedule.items(self._done_steps))
        return self._dispatcher

    def _may_proceed(self, done_steps: int) -> bool:
        """Return the answer to the first rank that asked after a step: all ranks stop after the same one."""
        proceed = self._proceed.setdefault(done_steps, not self._stop.requested)
        self._proceed.pop(done_steps - 2, None)  # no rank is more than one step behind another
        return proceed


def run_workers(
    spec: RunSpec,
    stop: StopRequest,
    progress: StepProgress,
    consumer: tuple[str, str] = TRAINER,
    work: Callable[[RunController], object] | None = None,
) -> None:
    """Run every worker of a run, as ``worker_specs`` has them, until all have ended (``RunController.run``)."""
    with (
        saved_dataset(spec.dataset, spec.directory.root) as dataset,
        spec.launcher() as launcher,
        progress,
    ):
        stop.on_request(launcher.wake)
        workers = list(worker_specs(spec, dataset, consumer))
        RunController(spec, launcher, stop, progress).run(workers, work)
