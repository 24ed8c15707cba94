"""This worker program runs a trainer rank."""

from __future__ import annotations

import functools
import gc
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from spec_core.errors import DeadlineExceeded
from spec_processes.sockets.addresses import format_address
from spec_processes.sockets.rendezvous import TcpRendezvous
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.plan.resolve import resolve_parts
from spec_trainer.run.spec import RunSpec
from spec_trainer.run.timer import Timer
from spec_trainer.training.wiring import Consume, RankLinks, rank_features, train_rank
from spec_trainer.workers.dataset_copy import check_sees_run_directory, run_dataset, sees_run_directory
from spec_trainer.workers.decoded_folder import cycle_dataset
from spec_trainer.workers.protocol import (
    ControlMessage,
    DatasetPart,
    DatasetWanted,
    Exported,
    Finished,
    Measured,
    Perform,
    Proceed,
    Ready,
    Released,
    RendezvousAddress,
    Start,
    StepDone,
    StepShown,
    Stop,
    TrainCycle,
    Trained,
    WorkerOrder,
)
from spec_trainer.workers.run_driver import RankTask
from spec_trainer.workers.task_messages import task_part
from spec_trainer.workers.worker_main import ControllerLink

M = TypeVar("M", bound=ControlMessage)


class RankLink:
    """A trainer rank's side of the protocol with the controller.

    A thread reads the controller's messages; callers wait for a message by its type.
    """

    def __init__(self, controller: ControllerLink, order: WorkerOrder) -> None:
        """Start to read messages from ``controller``. ``order``: the description of this worker."""
        self._controller = controller
        self._start_s = order.config["timeouts"]["start_s"]
        """Longest wait, in seconds, for a message that the controller sends before the first step."""
        self.prefill_s = 0.0
        """The newest ``Proceed.prefill_s``."""
        self._arrived: dict[type[ControlMessage], queue.SimpleQueue[Any]] = {
            kind: queue.SimpleQueue() for kind in (DatasetPart, RendezvousAddress, Start, Proceed, Stop)
        }
        self._measured: Future[dict[str, Any]] = Future()
        """Future of the figures of the draft that was exported last."""
        # Messages that may come after a part of the run.
        self._arrived[TrainCycle] = self._arrived[Perform] = self._arrived[Stop]
        self._following: ControlMessage = Stop()
        self.result: dict[str, Any] = {}
        """Result of the task that began last (``RankLinks.result``)."""
        threading.Thread(target=self._read, name="controller", daemon=True).start()

    def wait(self, kind: type[M], timeout_s: float | None = None) -> M:
        """Wait for the next message of type ``kind`` and return it; raise DeadlineExceeded if it is late."""
        try:
            return self._arrived[kind].get(timeout=timeout_s)
        except queue.Empty as error:
            raise DeadlineExceeded(f"the controller sent no {kind.__name__} within {timeout_s} s") from error

    def _after_work(self) -> ControlMessage:
        """Wait for the message that the controller sends when a part of the run is done; return it.

        It is Stop, TrainCycle or Perform.
        """
        return self._arrived[Stop].get()

    def ask(self, wanted: DatasetWanted) -> DatasetPart:
        """Request a piece of a dataset file and return the reply."""
        self._controller.send(wanted)
        return self.wait(DatasetPart, self._start_s)

    def join(self, stack: ExitStack, order: WorkerOrder, spec: RunSpec) -> TcpRendezvous:
        """Join the rendezvous of the trainer ranks and return it.

        Rank 0 listens, and the controller forwards its address to the other ranks.
        """
        rank = order.index
        timeouts = spec.config.timeouts
        address = (
            format_address(self._controller.address, 0)
            if rank == 0
            else self.wait(RendezvousAddress, self._start_s).address
        )
        rendezvous = stack.enter_context(
            TcpRendezvous(address, rank, spec.config.train.ranks, order.token, timeouts.step_s)
        )
        if rank == 0:
            self._controller.send(RendezvousAddress(rendezvous.address))
        rendezvous.join(timeouts.start_s)
        return rendezvous

    def work(self, address: str, done_steps: int, work: Callable[[], object]) -> None:
        """Report Ready, call ``work`` once every worker is ready, and wait until no worker needs this rank.

        The wait is needed because other workers may still use this rank's key-value store, and the memory
        into which engines send. ``address``: where this rank receives features. ``done_steps``: steps of its
        checkpoint.
        """
        self._controller.send(Ready(address, done_steps))
        self.wait(Start, self._start_s)
        finished = Finished()
        try:
            work()
        except Interrupted as stopped:
            finished = Finished(str(stopped))
        self._controller.send(replace(finished, result=self.result))
        if not isinstance(self._following, Perform):  # no other worker needs the one rank that performs
            self._following = self._after_work()

    def parts(self, spec: RunSpec) -> Iterator[_RankPart]:
        """Yield the parts of a run: the whole run, each cycle (``decode.every``), or each task (``follow``).

        After each yield, the caller must call this object's method ``work`` with a function that does the part.
        """
        if not spec.config.decode.every and not spec.config.follow.servers:
            yield _RankPart(spec)
            return
        self._controller.send(Ready())
        self._following = self._after_work()
        while not isinstance(message := self._following, Stop):
            self.prefill_s = 0.0
            self.result = {}
            yield _rank_part(spec, message)
            if isinstance(message, Perform):
                gc.collect()  # for the reason that InlineDriver gives
                self._following = self._after_work()

    def should_stop(self, done_steps: int) -> bool:
        """Ask the controller after a step whether to stop; every rank gets the same answer for the same step."""
        self._controller.send(StepDone(done_steps))
        answer = self.wait(Proceed)
        self.prefill_s = answer.prefill_s
        return not answer.proceed

    def notes(self, notes: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``notes`` and, under ``prefill_s``, the seconds that engines spent on captures in this cycle.

        If ``notes`` is empty, as in a run without cycles, return an empty dict.
        """
        return {**notes, "prefill_s": self.prefill_s} if notes else {}

    def show(self, record: dict[str, Any]) -> None:
        """Send the metrics of a step to the controller, for the progress display."""
        self._controller.send(StepShown(record))

    def measure(self, version: int, folder: Path) -> Future[dict[str, Any]]:
        """Let the run's decoders measure the draft in ``folder``; return a future of the figures."""
        self._measured = Future()
        self._controller.send(Exported(version, str(folder)))
        return self._measured

    def trained(self, spec: RunSpec, rank: int, row: dict[str, Any]) -> None:
        """Send a step's sample ids to the controller, which writes the file of the data-parallel rank."""
        share = spec.schedule.settings.data_parallel_ranks[rank]
        self._controller.send(Trained(share, row))

    def released(self, rank: int, *request_ids: int) -> None:
        """Report to the controller that rank ``rank`` has freed the transport memory of some samples."""
        self._controller.send(Released(rank, list(request_ids)))

    def _read(self) -> None:
        while (message := self._controller.receive()) is not None:
            if isinstance(message, Measured):
                self._measured.set_result(message.figures)
            else:
                self._arrived[type(message)].put(message)
        # The run has ended. The main thread may wait in a collective for a rank that will never come; a checkpoint
        # that it is writing is whole or not there.
        os._exit(1)


@dataclass(frozen=True)
class _RankPart:
    """The run or a part of it, and the function that trains or measures with its features on a rank."""

    spec: RunSpec
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields that are added to each row of metrics."""
    consume: Consume = train_rank


def _rank_part(spec: RunSpec, message: ControlMessage) -> _RankPart:
    """Return the part of run ``spec`` that a message of the controller describes."""
    if isinstance(message, Perform):
        task = RankTask(entry=message.entry, arguments=message.arguments)
        return _RankPart(task_part(spec, message), message.notes, task.consume)
    assert isinstance(message, TrainCycle)
    part = spec.cycle(cycle_dataset(spec.config, message.number), range(*message.steps))
    return _RankPart(part.starting_at(message.start_step), message.notes)


def _on_its_own(stack: ExitStack, order: WorkerOrder, spec: RunSpec) -> RunSpec:
    """Return the run with a temporary run directory if this rank cannot access the run directory."""
    if order.index == 0 or spec.config.decode.every:
        check_sees_run_directory(order)
    folder = stack.enter_context(TemporaryDirectory(prefix="spec-rank-"))
    own = replace(spec, config=spec.config.model_copy(update={"output": Path(folder)}))
    own.directory.open(own.identity, own.config)
    return own


def run_trainer(stack: ExitStack, controller: ControllerLink, order: WorkerOrder) -> None:
    """Train to the end of the run, or until the controller stops this rank."""
    link = RankLink(controller, order)
    spec = resolve_parts(order.config).with_dataset(run_dataset(order, link.ask))
    trained = None
    if not sees_run_directory(order):
        trained = functools.partial(link.trained, spec, order.index)
        spec = _on_its_own(stack, order, spec)
    if order.memory_fraction is not None:
        spec.backend.limit_memory(order.memory_fraction)
    device = spec.backend.device(0)
    rendezvous = link.join(stack, order, spec)
    features = stack.enter_context(rank_features(spec, order.index, device, controller.address_elsewhere))
    timer = Timer() if spec.config.decode.every else None
    for part in link.parts(spec):
        links = RankLinks(
            store=rendezvous.store("trainer"),
            stream=features.stream(part.spec, link.released),
            work=functools.partial(link.work, features.address),
            should_stop=link.should_stop,
            show=link.show,
            measure=link.measure if order.index == 0 else None,
            trained=trained,
            notes=functools.partial(link.notes, part.notes),
            timer=timer,
            result=link.result,
        )
        part.consume(part.spec, order.index, device, links)
