"""A trainer rank as a process of its own."""

from __future__ import annotations

import functools
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

from spec_core.errors import DeadlineExceeded
from spec_core.rendezvous import Rendezvous
from spec_trainer.data.store import open_dataset
from spec_trainer.feature_stream import FeatureStream
from spec_trainer.loop import train
from spec_trainer.offline.store import open_features
from spec_trainer.offline.stream import StoredStream
from spec_trainer.resolve import resolve_parts
from spec_trainer.stop_request import Interrupted
from spec_trainer.wiring import RankLinks, finish, train_state

if TYPE_CHECKING:
    from contextlib import ExitStack

    import torch
    from torch.distributed import Store

    from spec_core.processes.control import ControlChannel, Record
    from spec_trainer.feature_stream import BatchSource
    from spec_trainer.run_spec import RunSpec


class LauncherSide:
    """What the launcher tells this rank, read by a thread; the loop asks for it by kind."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._arrived: dict[str, queue.SimpleQueue[Record]] = {
            kind: queue.SimpleQueue() for kind in ("rendezvous", "start", "go_on", "stop")
        }
        threading.Thread(target=self._read, name="control", daemon=True).start()

    def wait(self, kind: str, timeout_s: float | None = None) -> Record:
        try:
            return self._arrived[kind].get(timeout=timeout_s)
        except queue.Empty as error:
            raise DeadlineExceeded(f"the launcher sent no {kind!r} within {timeout_s} s") from error

    def should_stop(self, done_steps: int) -> bool:
        """Asks after every step: the launcher gives all ranks the same answer for the same step."""
        self._channel.send("step", done=done_steps)
        return not self.wait("go_on")["value"]

    def show(self, record: dict[str, Any]) -> None:
        self._channel.send("progress", record=record)

    def _read(self) -> None:
        for record in self._channel.records():
            self._arrived[record["kind"]].put(record)
        # The launcher has gone or wants this process to end. The main thread may wait in a collective for a rank that
        # will never come; a checkpoint that it is writing is whole or not there.
        os._exit(1)


def run(stack: ExitStack, channel: ControlChannel, order: Record) -> None:
    """Trains to the end of the run, or until the launcher ends it."""
    launcher = LauncherSide(channel)
    rank = order["rank"]
    spec = resolve_parts(order["config"]).with_dataset(open_dataset(order["dataset"]))
    if order["memory_fraction"] is not None:
        spec.backend.limit_memory(order["memory_fraction"])
    device = spec.backend.device(0)
    store = _join(stack, channel, launcher, order, spec)
    stream, address = (_engine_stream if spec.config.data.features is None else _folder_stream)(
        stack, channel, spec, rank, device
    )
    links = RankLinks(store=store, should_stop=launcher.should_stop, show=launcher.show)
    training = stack.enter_context(train_state(spec, rank, device, stream, links))
    channel.send("ready", address=address, done_steps=training.done_steps)
    launcher.wait("start", spec.config.timeouts.start_s)
    try:
        finish(training, train(training))
    except Interrupted as stopped:
        channel.send("interrupted", message=str(stopped))
    else:
        channel.send("finished")
    launcher.wait("stop")  # until then others may need what this rank holds: the store, the receiver


def _join(
    stack: ExitStack, channel: ControlChannel, launcher: LauncherSide, order: Record, spec: RunSpec
) -> Store:
    """The trainer's ranks find each other: rank 0 listens, the launcher passes its address on."""
    rank, world_size = order["rank"], spec.config.train.ranks
    address = (
        "127.0.0.1:0" if rank == 0 else launcher.wait("rendezvous", spec.config.timeouts.start_s)["address"]
    )
    timeouts = spec.config.timeouts
    rendezvous = stack.enter_context(Rendezvous(address, rank, world_size, order["token"], timeouts.step_s))
    if rank == 0:
        channel.send("rendezvous", address=rendezvous.address)
    rendezvous.join(timeouts.start_s)
    return rendezvous.store("trainer")


def _engine_stream(
    stack: ExitStack, channel: ControlChannel, spec: RunSpec, rank: int, device: torch.device
) -> tuple[BatchSource, str | None]:
    """What engines send to this rank, and the address that they send it to."""
    transport = spec.backend.transport(spec.config.placement.kind)
    receiver = stack.enter_context(transport.listen(spec.schema, spec.window_bytes))
    freed = functools.partial(released, channel)
    stream = FeatureStream(spec.schedule, rank, receiver, spec.schema, spec.config, device, freed)
    return stream, receiver.address


def _folder_stream(
    stack: ExitStack, channel: ControlChannel, spec: RunSpec, rank: int, device: torch.device
) -> tuple[BatchSource, str | None]:
    """``data.features``: nobody sends anything."""
    return stack.enter_context(StoredStream(spec, rank, open_features(spec), device)), None


def released(channel: ControlChannel, rank: int, num_tokens: int) -> None:
    """Tells the launcher that a sample's transport memory is free."""
    channel.send("released", rank=rank, num_tokens=num_tokens)
