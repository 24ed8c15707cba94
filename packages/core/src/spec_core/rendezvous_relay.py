"""What rank 0 runs for a Rendezvous: it admits members and passes every record on to all the others.

Records are framed by ``Frame``. The relay knows no calls and keeps no record but who has joined and who has left.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from spec_core.errors import ProtocolError
from spec_core.lobby import HELLO_S, MAX_HELLO_BYTES, MAX_STRANGERS, same_token

if TYPE_CHECKING:
    import socket

logger = logging.getLogger(__name__)

VERSION = 1
MAX_RECORD_BYTES = 64 << 20
"""Records are for membership and settings; tensors travel in process groups and transports."""
FLUSH_S = 1.0
"""How long ``close`` waits for members that do not read."""

_AT_ONCE = 4
"""Connections that are accepted in one go, before any of them is heard."""

LOST, REFUSED, JOIN = "lost", "refused", "join"


@dataclass(frozen=True)
class Frame:
    """One record. ``rank`` is the member that it comes from, or, in LOST, the member that has left."""

    call: str
    number: int
    rank: int
    payload: bytes = b""

    HEADER = struct.Struct("<IiQ16s")
    """Bytes of payload, rank, number of the call, name of the call."""

    def encode(self) -> bytes:
        return self.HEADER.pack(len(self.payload), self.rank, self.number, self.call.encode()) + self.payload

    @classmethod
    def decode(cls, header: bytes, limit: int = MAX_RECORD_BYTES) -> tuple[int, Frame]:
        """Bytes of the payload that follows, and the frame without it."""
        size, rank, number, call = cls.HEADER.unpack(header)
        if size > limit:
            raise ProtocolError(f"a record of {size} bytes was announced; at most {limit} are allowed")
        return size, cls(call.rstrip(b"\0").decode("ascii", "replace"), number, rank)

    def holding(self, payload: bytes) -> Frame:
        return Frame(self.call, self.number, self.rank, payload)


@dataclass(frozen=True)
class Hello:
    """Payload of a connection's first record (R2, R3)."""

    version: int
    token: str
    rank: int
    world_size: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        try:
            fields = json.loads(payload)
            return cls(
                int(fields["version"]), str(fields["token"]), int(fields["rank"]), int(fields["world_size"])
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ProtocolError("a first record that is no hello") from error


class Relay:
    """Serves one group from a thread of its own until ``close``."""

    def __init__(self, listener: socket.socket, token: str, world_size: int) -> None:
        self._listener = listener
        self._token = token
        self._world_size = world_size
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._left: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # in the order in which they came
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_in_one_line)
        self._server = await asyncio.start_server(self._attend, sock=self._listener, backlog=_AT_ONCE)
        self._listener.listen()  # more may queue than are accepted at once
        await self._stop.wait()
        self._server.close()
        await self._flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # one turn of the loop, in which aborted connections are closed

    async def _flush(self) -> None:
        """Members may still have to read the records of a call that rank 0 has already finished."""
        writers = list(self._writers.values())
        self._writers.clear()
        for writer in writers:
            writer.close()
        closed = (writer.wait_closed() for writer in writers)
        try:
            await asyncio.wait_for(asyncio.gather(*closed, return_exceptions=True), FLUSH_S)
        except TimeoutError:
            for writer in writers:
                writer.transport.abort()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._converse(reader, writer)
        except (ProtocolError, OSError, EOFError) as error:
            logger.debug("rendezvous: connection ended: %s", error)
        except asyncio.CancelledError:
            writer.transport.abort()  # Relay.close; passed on, the streams machinery would report it as an error
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await self._first_word(reader, writer)
        if not same_token(hello.token, self._token):
            logger.debug("rendezvous: refused a connection without the group's token")
            writer.write(Frame(REFUSED, 0, 0, b"it does not know the group's token").encode())
            return
        if objection := self._objection(hello):
            writer.write(Frame(REFUSED, 0, 0, objection.encode()).encode())
            return
        self._admit(hello.rank, writer)
        try:
            while True:
                self._pass_on(hello.rank, await _read_frame(reader, MAX_RECORD_BYTES))
        finally:
            self._forget(hello.rank)

    async def _first_word(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello:
        """Who comes when all places are taken gets the place of whoever has waited longest, as in a Lobby."""
        if len(self._strangers) == MAX_STRANGERS:
            eldest = next(iter(self._strangers))
            del self._strangers[eldest]
            eldest.transport.abort()
        self._strangers[writer] = None
        try:
            async with asyncio.timeout(HELLO_S):
                return Hello.decode((await _read_frame(reader, MAX_HELLO_BYTES)).payload)
        finally:
            self._strangers.pop(writer, None)

    def _objection(self, hello: Hello) -> str:
        """R3: why a holder of the token cannot be a member; empty if it can."""
        if hello.version != VERSION:
            return f"it speaks version {hello.version}, this group version {VERSION}"
        if hello.world_size != self._world_size:
            return f"it expects {hello.world_size} ranks, this group has {self._world_size}"
        if not 0 <= hello.rank < self._world_size:
            return f"rank {hello.rank} is outside 0..{self._world_size - 1}"
        if hello.rank in self._writers or hello.rank in self._left:
            return f"rank {hello.rank} has joined already"
        return ""

    def _admit(self, rank: int, writer: asyncio.StreamWriter) -> None:
        """The new member learns who is there and who has left; all learn of the new member."""
        for other in (*self._writers, *self._left):
            writer.write(Frame(JOIN, 0, other).encode())
        for other in self._left:
            writer.write(Frame(LOST, 0, other).encode())
        self._writers[rank] = writer
        self._pass_on(rank, Frame(JOIN, 0, rank))
        if self._server and len(self._writers) + len(self._left) == self._world_size:
            self._server.close()  # nobody else is awaited

    def _pass_on(self, rank: int, frame: Frame) -> None:
        """To all in one go. The member that it comes from gets it back without the payload, and knows by it that
        the others will get it whatever happens to this member next."""
        receipt = Frame(frame.call, frame.number, rank)
        record = receipt.holding(frame.payload).encode()
        for other, writer in self._writers.items():
            writer.write(receipt.encode() if other == rank else record)

    def _forget(self, rank: int) -> None:
        if self._writers.pop(rank, None) is not None:
            self._left.add(rank)
            self._pass_on(rank, Frame(LOST, 0, rank))


def _log_in_one_line(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A table of descriptors that is full, for one: asyncio tries again, and needs no traceback for it."""
    logger.warning("rendezvous: %s: %s", context["message"], context.get("exception"))


async def _read_frame(reader: asyncio.StreamReader, limit: int) -> Frame:
    size, frame = Frame.decode(await reader.readexactly(Frame.HEADER.size), limit)
    return frame.holding(await reader.readexactly(size))
