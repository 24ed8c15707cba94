"""PushedMemory: samples of a receiver's device, pushed there by senders of other devices, each over its own line.

A sample travels as soon as it can, whatever the trainer does: a thread per sender receives it, and ``receive`` hears
of it when it is all there. Why no cycle of waits can arise, between devices that also run collectives:

1. The sender announces a sample when its input is complete and its send is queued, with nothing in front of it but
   sends that are done.
2. Room is granted only when its last reader is through, so a receive that is posted has nothing to wait for on the
   receiver's device.
3. No stream of the engine waits for a send (it goes from a copy), none of the trainer's for a receive.

So the two kernels of a transfer wait for each other and for room on their devices, and nothing that holds room there
without an end waits for them. Receives of one receiver take turns: one at a time has blocks on the device.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import struct
import threading
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from spec_core.errors import RunError
from spec_core.streams.block_memory import Block, MemoryProvider, ReceiverMemory
from spec_core.streams.device_arena import ScatteredBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from spec_backend_cuda.line import Line
    from spec_core.streams.block_memory import Arrived
    from spec_core.streams.device_arena import DeviceArena
    from spec_core.streams.holes import Range

log = logging.getLogger(__name__)

GRACE_S = 0.2
"""How long a transfer may go on when its sender is gone: it may be through already at the sender's end. One that
waits for its turn has not begun."""
CLOSE_S = 5.0
"""How long ``close`` waits for readers whose device does not come to them."""

_LENGTH = struct.Struct("<Q")


def piece_lengths(note: bytes) -> list[int]:
    """What a sender cuts a sample's block into (``_Inlet.note``)."""
    return [length for (length,) in _LENGTH.iter_unpack(note)]


class PushedMemory(MemoryProvider):
    """Gives each sender an inlet of its own; all share one arena."""

    kind: ClassVar[str] = "pushed"

    def __init__(
        self, arena: DeviceArena, device: torch.device, new_line: Callable[[], tuple[str, Line]]
    ) -> None:
        """``new_line`` gives what a sender must know to reach this end of a line, and this end."""
        self.arena, self.device = arena, device
        self.turn = threading.Lock()
        """Of the inlet that receives."""
        self._new_line = new_line
        self._inlets: list[_Inlet] = []
        self._freed: queue.SimpleQueue[_Freed | None] = queue.SimpleQueue()
        self._sweeper = threading.Thread(target=self._sweep, name="pushed-sweep", daemon=True)
        self._sweeper.start()

    def admit(self, place: str, room: Callable[[], None]) -> ReceiverMemory:
        offer, line = self._new_line()
        self._inlets = [inlet for inlet in self._inlets if not inlet.ended]
        self._inlets.append(_Inlet(self, line, offer, room))
        return self._inlets[-1]

    def sweep(self, freed: _Freed) -> None:
        """Gives room back when its reader is through."""
        self._freed.put(freed)

    def close(self) -> None:
        for inlet in self._inlets:
            inlet.close()
        for inlet in self._inlets:  # each may have waited for another's turn
            inlet.join()
        self._freed.put(None)
        self._sweeper.join(CLOSE_S)
        self.arena.close()

    def _sweep(self) -> None:
        """A thread: if room were granted before, a send could wait on its device for a reader on this one."""
        while (freed := self._freed.get()) is not None:
            try:
                freed.read.synchronize()
            except RuntimeError:
                log.exception("the device has failed: no room is given back any more")
                return
            self.arena.give(freed.pieces)
            freed.room()


class _Freed(NamedTuple):
    pieces: Sequence[Range]
    read: torch.cuda.Event
    room: Callable[[], None]


class _Inlet(ReceiverMemory):
    """One sender's way into pushed memory. Its thread ends with the sender."""

    kind: ClassVar[str] = PushedMemory.kind

    def __init__(self, whole: PushedMemory, line: Line, offer: str, room: Callable[[], None]) -> None:
        self.descriptor, self.size, self.offer = None, whole.arena.size, offer
        self._whole, self._line, self._room = whole, line, room
        self._fetches: queue.SimpleQueue[tuple[ScatteredBlock, Arrived] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = self._parted = False
        """The line is in use; the sender is gone."""
        self._deadline: threading.Timer | None = None
        """While both are so."""
        self._when_ended: Callable[[], None] = _nothing
        self._thread = threading.Thread(target=self._receive_all, name="pushed-inlet", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def allocate(self, num_tokens: int) -> Block | None:
        pieces = self._whole.arena.take(num_tokens)
        return None if pieces is None else ScatteredBlock(pieces[0][0] if pieces else 0, num_tokens, pieces)

    def note(self, block: Block) -> bytes:
        assert isinstance(block, ScatteredBlock)
        return b"".join(_LENGTH.pack(stop - start) for start, stop in block.pieces)

    def fetch(self, block: Block, arrived: Arrived) -> None:
        assert isinstance(block, ScatteredBlock)
        self._fetches.put((block, arrived))

    def part(self, ended: Callable[[], None]) -> None:
        self._when_ended = ended
        with self._lock:
            self._parted = True
            self._set_deadline()
        self._fetches.put(None)

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        assert isinstance(block, ScatteredBlock)
        return self._whole.arena.view(block.pieces, block.num_tokens)

    def free(self, block: Block) -> None:
        assert isinstance(block, ScatteredBlock)
        read = self._line.new_event()
        read.record(torch.get_device_module(self._whole.device).current_stream(self._whole.device))
        self._whole.sweep(_Freed(block.pieces, read, self._room))

    def reclaim(self, block: Block) -> None:
        """Nothing has read it, and what was received into it is through or aborted."""
        assert isinstance(block, ScatteredBlock)
        self._whole.arena.give(block.pieces)

    def close(self) -> None:
        self._fetches.put(None)
        self._line.abort()

    def join(self) -> None:
        self._thread.join()

    def _receive_all(self) -> None:
        """The thread."""
        with self._in_use():
            failure = _failure_of(self._line.open)
        while (fetch := self._fetches.get()) is not None:
            block, arrived = fetch
            failure = failure or _failure_of(partial(self._receive, block))
            arrived(failure)
        self._when_ended()
        self._line.close()

    def _receive(self, block: ScatteredBlock) -> None:
        if block.pieces:
            with self._whole.turn, self._in_use():
                self._line.start(self._whole.arena.parts(block.pieces))
                self._line.finish()

    @contextlib.contextmanager
    def _in_use(self) -> Generator[None]:
        """Around what waits for the sender."""
        with self._lock:
            self._busy = True
            self._set_deadline()
        try:
            yield
        finally:
            with self._lock:
                self._busy = False
                if self._deadline is not None:
                    self._deadline.cancel()
                    self._deadline.join()

    def _set_deadline(self) -> None:
        if self._busy and self._parted:
            self._deadline = threading.Timer(GRACE_S, self._line.abort)
            self._deadline.start()


def _failure_of(step: Callable[[], None]) -> RunError | None:
    try:
        step()
    except RunError as error:
        return error
    except RuntimeError as error:  # what torch raises for everything
        return RunError(f"a sample could not be received: {error}")
    return None


def _nothing() -> None:
    """Of an inlet whose sender is there."""
