"""WorkerDriver runs a training run with worker processes (engines and trainer ranks), on any launcher.

The driver is the controller's side of the protocol: it hands out capture batches and replies to the ranks after every
step, and trains nothing itself. ``spec-trainer capture`` has one writer instead of the ranks. If the run alternates
between decoding and training (``decode.every``), the workers keep running from cycle to cycle.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core.errors import RunError
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.data.store import saved_dataset
from spec_trainer.run.dispatch import Dispatcher
from spec_trainer.run.metrics import StepLines
from spec_trainer.workers import protocol
from spec_trainer.workers.dataset_copy import read_part
from spec_trainer.workers.remote_decoders import RemoteDecoders
from spec_trainer.workers.remote_engine import RemoteEngine
from spec_trainer.workers.run_driver import RunDriver
from spec_trainer.workers.task_messages import task_message
from spec_trainer.workers.worker_specs import DECODER, TRAINER, worker_specs
from spec_trainer.workers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from spec_core import Launcher, WorkerSpec
    from spec_trainer.base.progress import StepProgress
    from spec_trainer.base.stop_request import StopRequest
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.workers.passes import Pass
    from spec_trainer.workers.run_driver import MeasureDraft, Pause, RankTask

log = logging.getLogger(__name__)


@contextmanager
def worker_driver(
    spec: RunSpec, stop: StopRequest, progress: StepProgress, consumer: tuple[str, str] = TRAINER
) -> Iterator[WorkerDriver]:
    """Yield a driver whose workers are ready.

    ``consumer``: role and entry function of the workers that receive features.
    """
    spec.directory.logs.mkdir(exist_ok=True)
    with (
        saved_dataset(spec.dataset, spec.directory.root) as dataset,
        spec.launcher() as launcher,
        progress,
    ):
        stop.on_request(launcher.wake)
        workers = list(worker_specs(spec, dataset, consumer))
        with WorkerDriver(spec, launcher, stop, progress).started(workers) as driver:
            yield driver


@dataclass(kw_only=True)
class _PartInTraining:
    """State of training for the whole run or for one cycle, from the moment when every rank may start."""

    dispatcher: Dispatcher
    done_steps: int
    working: set[str]
    """Names of the ranks that have not finished."""
    proceed: dict[int, bool] = field(default_factory=dict[int, bool])
    """Steps done -> whether every rank is to proceed."""
    exported: tuple[str, protocol.Exported] | None = None
    """Rank that has exported a draft to measure, and its message."""
    pause: Pause | None = None
    """Function that is called after each step of a task, before its rank gets the answer ``Proceed``."""
    paused: tuple[str, int] | None = None
    """Rank that waits for the end of ``pause``, and its number of steps done."""
    interrupted: str | None = None
    result: dict[str, Any] = field(default_factory=dict[str, Any])
    """Result of the performed task; empty after training."""


class WorkerDriver(RunDriver):
    """Drives one run from the start of its workers to their exit, in the calling thread."""

    def __init__(self, spec: RunSpec, launcher: Launcher, stop: StopRequest, progress: StepProgress) -> None:
        """Prepare the run of ``spec``; nothing starts before ``started``."""
        self._stop = stop
        self._progress = progress
        self._workers = Workers(spec, launcher, self)
        self._dataset = Path()
        """Folder of the tokenised dataset."""
        self._logs = spec.directory.logs
        self.engines: dict[str, RemoteEngine] = {}
        """Name -> engine that captures."""
        self._decoders = RemoteDecoders(self._workers, stop)
        self._ranks: dict[str, protocol.Ready] = {}
        """Rank's name -> its newest Ready message."""
        self._loaded: protocol.TrainCycle | protocol.Perform | None = None
        """Message of the newest cycle of a run that decodes, or of the newest task."""
        self._follows = bool(spec.config.follow.servers)
        """Whether the run follows live requests: its rank performs tasks, and does not exit after
        ``Finished``."""
        self._part: _PartInTraining | None = None
        """State of the run or cycle that was started last."""

    @contextmanager
    def started(self, workers: Sequence[WorkerSpec]) -> Iterator[WorkerDriver]:
        """Start ``workers`` and yield this driver once all are ready; stop them after the ``with`` block."""
        for spec in workers:
            self._dataset = Path(spec.arguments["dataset"])
            if spec.arguments["program"] == DECODER:
                self._decoders.names.append(spec.name)
            elif spec.role == "engine":
                self.engines[spec.name] = RemoteEngine(spec.name, self._workers)
            else:
                self._ranks[spec.name] = protocol.Ready()
        self._workers.start(workers)
        if not self._workers.await_ready(lambda: self._stop.requested):
            raise Interrupted("interrupted before the first step; the same command starts again")
        try:
            yield self
        except Interrupted:
            self._workers.stop()
            raise
        self._workers.stop()

    def train(
        self, part: RunSpec, notes: Mapping[str, Any] | None = None, measure: MeasureDraft | None = None
    ) -> float:
        """Train the remaining steps of ``part``, the run or one cycle.

        Return the seconds that engines spent on captures. ``measure`` is called for each exported draft.
        """
        if notes is not None:
            self._begin_cycle(part, notes)
        training = self._part = self._dispatch(part)
        self._complete(training, measure)
        return training.dispatcher.busy_s

    def perform(
        self,
        task: RankTask,
        part: RunSpec,
        notes: Mapping[str, Any] | None = None,
        pause: Pause | None = None,
    ) -> dict[str, Any]:
        """Run ``task`` on the samples of the RunSpec ``part``, and return the task's result.

        Messages carry the samples.
        """
        self._load(task_message(task, part, notes or {}))
        performing = self._part = self._dispatch(part)
        performing.pause = pause
        self._complete(performing)
        return performing.result

    def wait(self, seconds: float) -> None:
        """Handle messages and failures for ``seconds``; return early if a stop is requested."""
        self._workers.until(lambda: self._stop.requested, time.monotonic() + seconds)

    def _complete(self, training: _PartInTraining, measure: MeasureDraft | None = None) -> None:
        """Handle messages until every rank has finished; raise Interrupted if a rank was stopped."""
        while training.working:
            self._workers.until(lambda: not training.working or bool(training.exported or training.paused))
            if training.exported is not None and measure is not None:
                (rank, draft), training.exported = training.exported, None
                figures = {} if self._stop.requested else measure(draft.version, Path(draft.folder))
                self._workers.send(rank, protocol.Measured(figures))
            if training.paused is not None and training.pause is not None:
                (rank, steps), training.paused = training.paused, None
                training.pause(lambda: self._stop.requested, self.wait)
                self._proceed(training, rank, steps)
        if training.interrupted is not None:
            raise Interrupted(training.interrupted)

    def serve(self, version: int, folder: Path) -> None:
        """Let every decoder serve the draft in ``folder`` as ``version``, and wait until all serve it."""
        self._decoders.serve(version, folder)

    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> Pass:
        """Answer prompts, in portions, on the decoders that are free.

        If a stop is requested, finish the portions in progress and raise Interrupted.
        """
        return self._decoders.answer(prompts, seed)

    @property
    def done_steps(self) -> int | None:
        """Optimizer steps done; None before the first call of ``train``."""
        return None if self._part is None else self._part.done_steps

    def lost(self, engine: str) -> None:
        """Let other engines capture the batches of a lost engine."""
        assert self._part is not None
        self._part.dispatcher.lost(self._number_of(engine))

    def regained(self, engine: str) -> None:
        """Send capture batches again to an engine that was lost and has been replaced."""
        assert self._part is not None
        self.engines[engine].expect_nothing()
        if self._loaded is not None:
            self.engines[engine].send(self._loaded)
        self._part.dispatcher.regained(self._number_of(engine))

    def handle(self, worker: str, message: protocol.ControlMessage) -> None:
        """Handle a worker's message."""
        match message:
            case protocol.Captured(batch):
                self.engines[worker].captured(batch)
            case protocol.DatasetWanted():
                self._workers.send(worker, read_part(self._dataset, message))
            case protocol.RendezvousAddress():
                for other in (name for name in self._ranks if name != worker):
                    self._workers.send(other, message)
            case protocol.Ready():
                if worker in self._ranks:
                    self._ranks[worker] = message
            case protocol.Served():
                self._decoders.served(worker)
            case protocol.Generated():
                self._decoders.generated(worker, message)
            case _:
                self._handle_training(worker, message)

    def _handle_training(self, rank: str, message: protocol.ControlMessage) -> None:
        """Handle a message that trainer rank ``rank`` sends during training."""
        assert self._part is not None
        part = self._part
        match message:
            case protocol.Released(number, request_ids):
                part.dispatcher.released(number, *request_ids)
            case protocol.StepDone(steps):
                part.done_steps = steps
                if part.pause is None:
                    self._proceed(part, rank, steps)
                else:
                    part.paused = rank, steps
            case protocol.StepShown(record):
                self._progress.show(record)
            case protocol.Trained(number, row):
                with StepLines(self._logs / f"trained-{number}.jsonl") as lines:
                    lines.write(row)
            case protocol.Exported():
                part.exported = rank, message
            case protocol.Finished(interrupted, result):
                part.interrupted = part.interrupted or interrupted
                part.result = result
                part.working.discard(rank)
                # With decoders there may be more cycles, or a measurement.
                if not self._decoders.names and not self._follows:
                    self._workers.expect_end(rank)
            case _:
                raise RunError(f"{rank} sent {message}, which only the controller sends")

    def _proceed(self, part: _PartInTraining, rank: str, steps: int) -> None:
        """Send ``Proceed`` to a rank that has done a step."""
        self._workers.send(rank, protocol.Proceed(self._may_proceed(part, steps), part.dispatcher.busy_s))

    def _may_proceed(self, part: _PartInTraining, done_steps: int) -> bool:
        """Return whether training continues after a step.

        The answer for the first rank that has done the step is given to all other ranks, too.
        """
        proceed = part.proceed.setdefault(done_steps, not self._stop.requested)
        part.proceed.pop(done_steps - 2, None)  # no rank is more than one step behind another
        return proceed

    def _number_of(self, engine: str) -> int:
        return list(self.engines).index(engine)

    def _begin_cycle(self, part: RunSpec, notes: Mapping[str, Any]) -> None:
        """Let ranks and engines load the answers of a cycle."""
        steps = part.schedule.steps
        message = protocol.TrainCycle(
            number=notes["cycle"],
            steps=(steps.start, steps.stop),
            start_step=part.start_step,
            notes=dict(notes),
        )
        self._load(message)

    def _load(self, message: protocol.TrainCycle | protocol.Perform) -> None:
        """Let engines and trainer ranks load the data of ``message``; wait until the ranks are ready.

        Before that and after it, wait until every engine that replaces a failed engine is ready.
        """
        self._workers.await_replaced()
        self._workers.expect_ready(self._ranks)
        self._loaded = message
        for engine in self.engines.values():
            engine.send(message)
        for rank in self._ranks:
            self._workers.send(rank, message)
        self._workers.await_ready()
        self._workers.await_replaced()

    def _dispatch(self, part: RunSpec) -> _PartInTraining:
        """Start every rank, and begin to dispatch captures for its training."""
        found = {ready.done_steps for ready in self._ranks.values()}
        if len(found) != 1:
            raise RunError(f"trainer ranks resumed at different steps: {sorted(found)}")
        (done_steps,) = found
        addresses = [ready.address for ready in self._ranks.values()]
        engines = [engine.capture for engine in self.engines.values()]
        dispatcher = Dispatcher(part.schedule, part.schema, engines, addresses, part.window_bytes)
        for name in self._workers.without_devices:
            dispatcher.lost(self._number_of(name))
        for name in self._ranks:
            self._workers.send(name, protocol.Start())
        log.info("every process is ready; %d steps are done", done_steps)
        dispatcher.start(part.schedule.items(done_steps))
        return _PartInTraining(dispatcher=dispatcher, done_steps=done_steps, working=set(self._ranks))
