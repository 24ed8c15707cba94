"""A trainer rank as a worker."""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from spec_core.errors import DeadlineExceeded
from spec_core.rendezvous import Rendezvous, format_address
from spec_trainer.controller.protocol import (
    ControlMessage,
    Finished,
    Proceed,
    Ready,
    Released,
    RendezvousAddress,
    Start,
    StepDone,
    StepShown,
    Stop,
)
from spec_trainer.data.store import open_dataset
from spec_trainer.loop import train
from spec_trainer.resolve import resolve_parts
from spec_trainer.stop_request import Interrupted
from spec_trainer.wiring import RankLinks, batch_source, finish, train_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from torch.distributed import Store

    from spec_trainer.controller.protocol import WorkerOrder
    from spec_trainer.controller.worker_main import ControllerLink
    from spec_trainer.run_spec import RunSpec

M = TypeVar("M", bound=ControlMessage)


class RankLink:
    """A rank's side of the protocol: a thread reads what the controller sends, and the loop asks for it by type."""

    def __init__(self, controller: ControllerLink, order: WorkerOrder) -> None:
        """Keep the link to the controller and the order of this worker."""
        self._controller = controller
        self._start_s = order.config["timeouts"]["start_s"]
        """Longest wait, in seconds, for what the controller sends before the first step."""
        self._arrived: dict[type[ControlMessage], queue.SimpleQueue[Any]] = {
            kind: queue.SimpleQueue() for kind in (RendezvousAddress, Start, Proceed, Stop)
        }
        threading.Thread(target=self._read, name="controller", daemon=True).start()

    def wait(self, kind: type[M], timeout_s: float | None = None) -> M:
        """Return the next message of a type. Raise DeadlineExceeded."""
        try:
            return self._arrived[kind].get(timeout=timeout_s)
        except queue.Empty as error:
            raise DeadlineExceeded(f"the controller sent no {kind.__name__} within {timeout_s} s") from error

    def join(self, stack: ExitStack, order: WorkerOrder, spec: RunSpec) -> Store:
        """Return the store of the ranks: rank 0 listens, and the controller passes its address on to the others."""
        rank, timeouts = order.index, spec.config.timeouts
        address = (
            format_address(self._controller.address, 0)
            if rank == 0
            else self.wait(RendezvousAddress, self._start_s).address
        )
        rendezvous = stack.enter_context(
            Rendezvous(address, rank, spec.config.train.ranks, order.token, timeouts.step_s)
        )
        if rank == 0:
            self._controller.send(RendezvousAddress(rendezvous.address))
        rendezvous.join(timeouts.start_s)
        return rendezvous.store("trainer")

    def work(self, ready: Ready, work: Callable[[], object]) -> None:
        """Do the work of a rank once every worker is ready, and wait for the end of the run.

        Until then others may need what this worker holds: the store of the ranks, the memory that engines send to.
        """
        self._controller.send(ready)
        self.wait(Start, self._start_s)
        finished = Finished()
        try:
            work()
        except Interrupted as stopped:
            finished = Finished(str(stopped))
        self._controller.send(finished)
        self.wait(Stop)

    def should_stop(self, done_steps: int) -> bool:
        """Ask after a step whether to stop; every rank gets the same answer for the same step."""
        self._controller.send(StepDone(done_steps))
        return not self.wait(Proceed).proceed

    def show(self, record: dict[str, Any]) -> None:
        """Send the record of a step to the progress display."""
        self._controller.send(StepShown(record))

    def released(self, rank: int, num_tokens: int) -> None:
        """Send that the transport memory of a sample is free."""
        self._controller.send(Released(rank, num_tokens))

    def _read(self) -> None:
        while (message := self._controller.receive()) is not None:
            self._arrived[type(message)].put(message)
        # The run has ended. The main thread may wait in a collective for a rank that will never come; a checkpoint
        # that it is writing is whole or not there.
        os._exit(1)


def run_trainer(stack: ExitStack, controller: ControllerLink, order: WorkerOrder) -> None:
    """Train to the end of the run, or until the controller ends it."""
    link = RankLink(controller, order)
    spec = resolve_parts(order.config).with_dataset(open_dataset(order.dataset))
    if order.memory_fraction is not None:
        spec.backend.limit_memory(order.memory_fraction)
    device = spec.backend.device(0)
    links = RankLinks(store=link.join(stack, order, spec), should_stop=link.should_stop, show=link.show)
    stream, address = stack.enter_context(
        batch_source(spec, order.index, device, link.released, controller.address_elsewhere)
    )
    state = stack.enter_context(train_state(spec, order.index, device, stream, links))
    link.work(Ready(address, state.done_steps), lambda: finish(state, train(state)))
