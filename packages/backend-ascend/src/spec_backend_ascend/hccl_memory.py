"""HcclMemory: samples that stay in the sender's card until the receiver asks for them, and then travel over HCCL.

Each sender has a communicator of two with the receiver: the sender is rank 0 and its root. HCCL's calls may be
issued by one thread of a process at a time, and torch's own groups (FSDP's) know no lock of ours: so the receiver
posts its HcclRecv in the thread that calls ``receive``, which is the one that trains. Hence a sample that was
announced, and not received, is lost with its sender.
"""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import torch

from spec_backend_ascend.acl import drained
from spec_backend_ascend.announcing_sender import DeviceView
from spec_backend_ascend.hccl import Communicator, root_info
from spec_backend_ascend.place import place_of
from spec_core.cpu.block_memory import Block, ReceiverMemory, SenderEnd, SenderMemory
from spec_core.cpu.host_memory import HostEnd
from spec_core.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.cpu.shared_memory_wire import Layout, Record, Welcome
    from spec_core.records import FeatureSample

SENDER, RECEIVER = 0, 1
LINGER_S, POLL_S = 60.0, 1e-3
"""How long a closed sender keeps samples for a receiver that has not asked for them, and how often it looks."""

_spare_streams: list[torch.npu.Stream] = []
"""One per sender that is open, so that none waits for another's receiver; torch never gives a stream back."""


class HcclMemory(ReceiverMemory):
    """Serves one sender of another card; ``everyone`` then gets another one for the next. Has no memory until a
    sample is read; what is announced counts against the window all the same, and lies in the sender's card."""

    kind: ClassVar[str] = "hccl"

    def __init__(self, layout: Layout, device: torch.device, everyone: list[ReceiverMemory]) -> None:
        self._layout, self._device, self._everyone = layout, device, everyone
        self.size = 1
        self.descriptor = os.memfd_create(
            "spec-hccl", os.MFD_CLOEXEC
        )  # the wire passes one; nothing is in it
        self._communicator: Future[Communicator] | None = None

    def serves(self, place: str) -> bool:
        kind, _, rest = place.partition("|")
        where, _, root = rest.partition("|")
        if kind != self.kind or where == place_of(self._device) or self._communicator is not None:
            return False
        self._everyone.insert(0, HcclMemory(self._layout, self._device, self._everyone))
        self._communicator = _connected(base64.b64decode(root), RECEIVER, self._device)
        return True

    def allocate(self, num_tokens: int) -> Block | None:
        return Block(0, num_tokens)

    def is_written(self, block: Block) -> bool:
        return False

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        assert self._communicator is not None
        communicator = self._communicator.result()
        communicator.check()
        size = self._layout.block_bytes(block.num_tokens)
        received = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            stream = torch.npu.current_stream(self._device)
            communicator.receive(received.data_ptr(), size, SENDER, stream.npu_stream)
        return self._layout.view(received, 0, block.num_tokens)

    def free(self, block: Block) -> None:
        """The memory goes with the sample."""

    def close(self) -> None:
        os.close(self.descriptor)
        _destroy(self._communicator)
        self._communicator = None


class HcclView(DeviceView):
    """``write`` copies a sample aside on the current stream; from there it is sent on a stream of its own, which
    waits for the receiver without anybody else's waiting for it."""

    def __init__(self, layout: Layout, root: bytes, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._communicator = _connected(root, SENDER, device)
        self._stream = _spare_streams.pop() if _spare_streams else torch.npu.Stream(device)
        self._copied = torch.npu.Event()
        self._staged: list[tuple[torch.npu.Event, Tensor]] = []

    def write(self, grant: Record, sample: FeatureSample) -> None:
        size = self._layout.block_bytes(len(sample.input_ids))
        staged = torch.empty(size, dtype=torch.uint8, device=self._device)
        ids, hidden = self._layout.view(staged, 0, len(sample.input_ids))
        ids.copy_(sample.input_ids)
        hidden.copy_(sample.hidden_TNH)
        self._copied = torch.npu.Event()
        self._copied.record(torch.npu.current_stream(self._device))
        if size:
            self._send(staged)

    @property
    def copied(self) -> torch.npu.Event:
        return self._copied

    def settle(self) -> None:
        self._copied.synchronize()

    def close(self) -> None:
        """What the receiver has not asked for yet stays for it, for a while; the process does not end before."""
        self.settle()
        if self._is_sent():
            self._end()
        else:
            threading.Thread(target=self._linger, name="hccl-linger").start()

    def _send(self, staged: Tensor) -> None:
        communicator = self._communicator.result()
        self._stream.wait_event(self._copied)
        communicator.send(staged.data_ptr(), staged.nbytes, RECEIVER, self._stream.npu_stream)
        sent = torch.npu.Event()
        sent.record(self._stream)
        drained(self._stream)  # a query must find the record on the device
        self._staged = [(event, kept) for event, kept in self._staged if not event.query()] + [(sent, staged)]

    def _is_sent(self) -> bool:
        return all(sent.query() for sent, _ in self._staged)

    def _linger(self) -> None:
        deadline = time.monotonic() + LINGER_S
        while not self._is_sent() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._end()

    def _end(self) -> None:
        _destroy(self._communicator)
        if self._is_sent():
            _spare_streams.append(self._stream)


class HcclEnd(SenderEnd):
    """A sender whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._root = device, root_info()
        self.place = f"{HcclMemory.kind}|{place_of(device)}|{base64.b64encode(self._root).decode()}"

    def attach(self, welcome: Welcome, descriptor: int, layout: Layout) -> SenderMemory:
        if welcome.memory != HcclMemory.kind:
            return HostEnd().attach(welcome, descriptor, layout)
        return HcclView(layout, self._root, self._device)


def _connected(root: bytes, rank: int, device: torch.device) -> Future[Communicator]:
    """Both ends make the communicator at the same time, each in a thread that ends with it."""

    def connect() -> Communicator:
        torch.npu.set_device(device)
        return Communicator(root, rank, 2)

    with contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(1, "hccl-connect")
        stack.callback(pool.shutdown, wait=False)
        return pool.submit(connect)


def _destroy(communicator: Future[Communicator] | None) -> None:
    if communicator is not None:
        with contextlib.suppress(RunError):
            communicator.result().destroy()
