"""Links of a PushPool that are sockets between processes, as they should be, slow or broken."""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_backend_cuda.p2p_link import P2PLink
from spec_backend_cuda.push_buffer import PushBuffer
from spec_backend_cuda.push_pool import PushPool
from spec_core import Transport
from spec_core.errors import DeadlineExceeded, PeerLost, RunError
from spec_kit.streams.async_sender import AsyncSender
from spec_kit.streams.buffer_pool import SenderConnector
from spec_kit.streams.connection import open_port
from spec_kit.streams.device_arena import DeviceArena, arena_bytes
from spec_kit.streams.receiver import StreamReceiver
from spec_kit.streams.wire import SampleLayout
from spec_testing.transport_stage import LONG_S

CPU = torch.device("cpu")
SLOW_S = 2.0


class SocketLink(P2PLink):
    """Like NCCL it does not notice that the other end is gone: it waits, until it is aborted."""

    def __init__(self, name: str, *, receives: bool) -> None:
        self._name, self._receives = name, receives
        self._aborted = threading.Event()
        self._parts: Sequence[Tensor] = ()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._end: socket.socket | None = None
        if receives:
            self._socket.bind(f"\0{name}")
            self._socket.listen()

    def open(self) -> None:
        self._attempt(self._open)

    def start(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts

    def finish(self) -> None:
        self._attempt(self._transfer)
        if self._aborted.is_set():  # as with NCCL, nobody knows then what has been transferred
            raise PeerLost("the link was aborted")

    def abort(self) -> None:
        self._aborted.set()
        for end in (self._socket, self._end):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        for end in (self._socket, self._end):
            if end is not None:
                end.close()

    def new_event(self) -> torch.cpu.Event:
        return torch.cpu.Event()

    def _open(self) -> None:
        if self._receives:
            self._end, _ = self._socket.accept()
        else:
            self._socket.connect(f"\0{self._name}")
            self._end = self._socket

    def _transfer(self) -> None:
        assert self._end is not None
        for part in self._parts:
            raw = memoryview(part.numpy())
            if not self._receives:
                self._end.sendall(raw)
            while self._receives and raw:
                count = self._end.recv_into(raw)
                if not count:
                    raise ConnectionResetError
                raw = raw[count:]

    def _attempt(self, step) -> None:
        try:
            step()
        except OSError as error:
            assert self._aborted.wait(LONG_S)
            raise PeerLost("the link was aborted") from error


class SlowLink(SocketLink):
    """Its transfers take their time."""

    def finish(self) -> None:
        time.sleep(SLOW_S)
        super().finish()


class SocketConnector(SenderConnector):
    def __init__(self, link: type[SocketLink]) -> None:
        self._link = link

    def attach(self, reply, descriptor, layout):
        assert descriptor is None
        return PushBuffer(layout, self._link(reply.offer, receives=False), CPU)


class PushTransport(Transport):
    def __init__(self, link: type[SocketLink] = SocketLink) -> None:
        self._link = link

    def listen(self, schema, window_bytes, host=""):
        layout = SampleLayout(schema)
        memory = torch.empty(arena_bytes(layout, window_bytes), dtype=torch.uint8)
        pool = PushPool(DeviceArena(memory, layout), CPU, self._new_link)
        return StreamReceiver(schema, window_bytes, [pool], open_port(host))

    def connect(self, address, schema, timeout_s):
        return AsyncSender(address, schema, timeout_s, SocketConnector(self._link))

    def _new_link(self):
        name = secrets.token_hex(8)
        return name, self._link(name, receives=True)


class SlowFirstLink(SocketLink):
    """The first receiving end takes its time."""

    num_receiving = 0

    def __init__(self, name: str, *, receives: bool) -> None:
        super().__init__(name, receives=receives)
        SlowFirstLink.num_receiving += receives
        self._slow = receives and SlowFirstLink.num_receiving == 1

    def finish(self) -> None:
        if self._slow:
            time.sleep(SLOW_S)
        super().finish()


class BrokenLink(SocketLink):
    """Its receiving end fails at the second sample."""

    num_finished = 0

    def finish(self) -> None:
        super().finish()
        self.num_finished += 1
        if self._receives and self.num_finished == 2:
            raise RunError("the device has failed")


class LateLink(SocketLink):
    """Its receiving end does not come."""

    def open(self) -> None:
        if self._receives:
            assert self._aborted.wait(LONG_S)
            raise PeerLost("the link was aborted")
        super().open()
        super().start([torch.empty(1, dtype=torch.uint8)])
        assert self._aborted.wait(LONG_S)
        raise PeerLost("the link was aborted")


class ImpatientLink(LateLink):
    """Its sending end gives up by itself."""

    def open(self) -> None:
        if not self._receives:
            raise DeadlineExceeded("the other end did not come")
        super().open()
