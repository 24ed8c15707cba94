"""A TcpRendezvous is a Rendezvous (``spec_core.rendezvous``) whose rank 0 listens at a TCP port.

Threat model: the token keeps out other users and processes of other runs. An ``AcceptLimiter`` bounds the cost of
connections that have not sent the token. Token and records are not encrypted: use loopback or a private network.

torch's TCPStore is not used, for three reasons (torch 2.13). Its client waits forever, whatever its timeout, if
the store's process is stopped. It does not notice that a member has died. It has no authentication, so any user of
the host may write into it.
"""

# torch.distributed declares no __all__, so its classes count as private names of another module.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import os
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from spec_core import Rendezvous
from spec_core.errors import DeadlineExceeded, PeerLost, ProtocolError
from spec_processes.sockets.addresses import bind, format_address, parse_address
from spec_processes.sockets.framed_socket import FramedSocket, detect_dead_host, peer_errors
from spec_processes.sockets.rendezvous_server import (
    JOIN,
    LOST,
    MAX_PACKET_BYTES,
    MAX_RECORD_BYTES,
    REFUSED,
    STORE,
    VERSION,
    Frame,
    JoinRequest,
    RendezvousServer,
    StoreRequest,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch


_kept_stores: list[torch.distributed.Store] = []
"""Stores that are implemented in Python. torch keeps only their C++ part alive, so this list keeps the Python part
alive."""


@functools.cache
def store_file() -> tuple[str, str]:
    """Create a file in memory; return the path by which this user's processes open it, and its name.

    The file has no other path, and the kernel lets no other user open it.
    """
    name = f"spec-store-{secrets.token_hex(8)}"
    return f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}", f"/memfd:{name} (deleted)"


@functools.cache
def _opened(file: str) -> str:
    """Open rank 0's store file; return a path that stays valid here, even after rank 0 has ended.

    torch opens the file for each call, the last time in the store's destructor, and aborts if it cannot.
    """
    return f"/proc/self/fd/{os.open(file, os.O_RDWR)}"


def _sees(file: str, name: str) -> bool:
    """Return whether this process can open the file ``name`` by the path ``file`` in /proc.

    On another host the same path may be absent, or lead to another file.
    """
    try:
        return os.readlink(file) == name and os.access(file, os.R_OK | os.W_OK)
    except OSError:
        return False


class TcpRendezvous(Rendezvous):
    """One rank's membership in a group, over TCP. Only one thread of a rank may use it at a time.

    ``address`` is where rank 0 listens (``127.0.0.1:0`` takes a free port); on the other ranks the address
    that rank 0 has published. ``token`` is a secret of the run, equal on all ranks.
    """

    def __init__(self, address: str, rank: int, world_size: int, token: str, timeout_s: float) -> None:
        """Store the arguments; on rank 0, start to listen (R1)."""
        if not token:
            raise ProtocolError(
                "a rendezvous needs a token: any secret string that all ranks of the run share"
            )
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._token = token
        self._host, self._port = parse_address(address)
        self._server: RendezvousServer | None = None
        self._channel: FramedSocket | None = None
        self._received: dict[int, dict[int, Frame]] = {}
        self._calls = 0
        self._broken: Exception | None = None
        self._lock = threading.Lock()
        if rank == 0:
            self._listen()

    @property
    def address(self) -> str:
        """Return ``host:port`` of rank 0 (R1)."""
        return format_address(self._host, self._port)

    @property
    def interface(self) -> str:
        """Return this process's address on the network of the members; it is known only after ``join``."""
        if self._channel is None:
            raise ProtocolError("join the rendezvous first")
        return self._channel.end.getsockname()[0]

    def join(self, timeout_s: float | None = None) -> Self:
        """Wait until all ranks have joined; every rank must call it before any other method (R3)."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            if self._channel is not None:
                raise ProtocolError("join was called twice")
            self._channel = self._connect(deadline)
            request = JoinRequest(
                version=VERSION, token=self._token, rank=self.rank, world_size=self.world_size
            )
            self._collect(Frame(JOIN, 0, self.rank, request.encode()), deadline)
        return self

    def barrier(self) -> None:
        """Wait until every rank has called ``barrier`` (R4)."""
        self._exchange("barrier", b"")

    def broadcast(self, payload: bytes | None, src: int) -> bytes:
        """Return the payload of rank ``src``; the payloads of other ranks are ignored (R4)."""
        mine = payload if self.rank == src else b""
        if mine is None:
            raise ProtocolError(f"rank {src} broadcasts, so it must give a payload")
        return self._exchange(f"broadcast {src}", mine)[src]

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in rank order (R4)."""
        return self._exchange("all_gather", payload)

    def all_gather_json(self, value: object) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        return [json.loads(payload) for payload in self.all_gather(json.dumps(value).encode())]

    def store(self, name: str) -> torch.distributed.Store:
        """Return a key-value store for torch's process groups.

        Every rank must call it. The store is valid while the rendezvous is open (R7).
        """
        from torch.distributed import FileStore, PrefixStore

        mine = [*store_file(), secrets.token_hex(8)] if self.rank == 0 else []
        file, file_name, namespace = self.all_gather_json(mine)[0]
        if all(self.all_gather_json(_sees(file, file_name))):
            store = FileStore(_opened(file))
        else:
            from spec_processes.sockets.rendezvous_store import RendezvousStore

            store = RendezvousStore(self._ask, self.timeout_s)
            _kept_stores.append(store)
        store.set_timeout(dt.timedelta(seconds=self.timeout_s))
        return PrefixStore(f"{namespace}/{name}", store)

    def close(self) -> None:
        """Leave the group; the calls of other ranks raise PeerLost. Idempotent (R8)."""
        if self._broken is None:
            self._broken = ProtocolError("the rendezvous was closed")
        if self._channel is not None:
            self._channel.shutdown()
            with self._lock:  # wait for the call of another thread
                self._channel.close()
        if self._server is not None:
            self._server.close()
        self._server = None

    def _listen(self) -> None:
        listener = bind(self._host, self._port)
        self._port = listener.getsockname()[1]
        self._server = RendezvousServer(listener, self._token, self.world_size)

    def _connect(self, deadline: float) -> FramedSocket:
        with peer_errors(
            f"rank 0 at {self.address} does not accept rank {self.rank}",
            f"rank {self.rank}: nobody listens at {self.address}",
        ):
            connection = socket.create_connection(
                (self._host, self._port), max(1e-3, deadline - time.monotonic())
            )
        detect_dead_host(connection)
        return FramedSocket(connection, MAX_PACKET_BYTES)

    def _exchange(self, call: str, payload: bytes) -> list[bytes]:
        if len(payload) > MAX_RECORD_BYTES:
            raise ProtocolError(f"{call} of {len(payload)} bytes; at most {MAX_RECORD_BYTES} are allowed")
        deadline = time.monotonic() + self.timeout_s
        with self._lock:
            if self._channel is None:
                raise ProtocolError("join the rendezvous first")
            return self._collect(Frame(call, self._calls, self.rank, payload), deadline)

    def _ask(self, request: StoreRequest) -> str | None:
        """Send a request to the store on rank 0 and return the answer; any thread may call it."""
        deadline = time.monotonic() + self.timeout_s
        with self._lock, self._unusable_on_error():
            self._send(Frame(STORE, 0, self.rank, request.encode()), deadline)
            while (frame := self._receive(deadline)).call != STORE:
                self._accept(frame)
        return json.loads(frame.payload)

    @contextlib.contextmanager
    def _unusable_on_error(self) -> Generator[None]:
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))
        try:
            yield
        except (DeadlineExceeded, PeerLost, ProtocolError) as error:
            self._broken = error
            raise

    def _collect(self, mine: Frame, deadline: float) -> list[bytes]:
        """Send this rank's record of the call; wait for all ranks' records and return their payloads."""
        frames = self._received.setdefault(mine.number, {})
        with self._unusable_on_error():
            self._send(mine, deadline)
            while len(frames) < self.world_size:
                self._accept(self._receive(deadline))
            self._compare(frames)
        self._calls += 1
        del self._received[mine.number]
        frames[self.rank] = mine  # this rank's record came back without its payload
        return [frames[rank].payload for rank in range(self.world_size)]

    def _accept(self, frame: Frame) -> None:
        if frame.call == REFUSED:
            raise ProtocolError(
                f"rank 0 at {self.address} refused rank {self.rank}: {frame.payload.decode()}"
            )
        if frame.call == LOST:
            raise PeerLost(f"rank {frame.rank} has left the rendezvous at {self.address}")
        self._received.setdefault(frame.number, {})[frame.rank] = frame

    def _compare(self, frames: dict[int, Frame]) -> None:
        calls = {frame.rank: frame.call for frame in frames.values()}
        if len(set(calls.values())) > 1:
            raise ProtocolError(f"ranks made different calls: {dict(sorted(calls.items()))}")

    def _send(self, frame: Frame, deadline: float) -> None:
        assert self._channel is not None
        with self._mapped():
            self._channel.send(frame.encode(), deadline)

    def _receive(self, deadline: float) -> Frame:
        assert self._channel is not None
        with self._mapped():
            return Frame.decode(self._channel.receive(deadline))

    @contextlib.contextmanager
    def _mapped(self) -> Generator[None]:
        try:
            yield
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise PeerLost(
                f"rank {self.rank} lost rank 0, which serves the rendezvous at {self.address}"
            ) from error

    def _late(self) -> DeadlineExceeded:
        others = set(range(self.world_size)) - {self.rank}
        missing = sorted(others - set(self._received.get(self._calls, {})))
        return DeadlineExceeded(f"rank {self.rank} waited in vain for ranks {missing} at {self.address}")
