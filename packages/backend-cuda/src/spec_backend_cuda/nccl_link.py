"""NcclLink is a communicator of a sender's GPU and a receiver's GPU, apart from torch's groups."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from spec_backend_cuda.nccl import NcclCommunicator, unique_id
from spec_backend_cuda.p2p_link import P2PLink
from spec_core.errors import PeerLost
from spec_kit import OwnStream

SENDER, RECEIVER = 0, 1
MAX_BLOCKS = 8
"""Maximum number of thread blocks that a transfer uses on each GPU. They are few compared with computation,
and more than features need: a block moves some 20 GB/s over NVLink, and an engine produces 2 GB/s."""
OPEN_S, POST_S = 60.0, 20.0
"""Maximum seconds for NCCL's setup of a communicator, and for the host's part of a transfer, on a busy
host."""


def new_link_name() -> str:
    """Return a name for a new link, by which sender and receiver find each other."""
    return base64.b64encode(unique_id()).decode()


class NcclLink(P2PLink):
    """A link on a separate stream, for which no other stream waits.

    The stream has high priority, so that the kernels of sender and receiver wait for each other as briefly as
    possible.
    """

    def __init__(self, name: str, device: torch.device, *, receives: bool) -> None:
        """Make the receiving or the sending side of the link ``name``."""
        self._name = base64.b64decode(name)
        self._device = device
        self._receives = receives
        self._communicator = NcclCommunicator()
        self._own_stream = OwnStream(device, priority=-1)
        self._stream: torch.cuda.Stream = self._own_stream.stream
        self._through = self.new_event()

    def open(self) -> None:
        """Connect the two GPUs by a first transfer, which completes only when both sides have queued it."""
        rank = RECEIVER if self._receives else SENDER
        with torch.cuda.device(self._device):
            self._communicator.join(self._name, rank, 2, time.monotonic() + OPEN_S, MAX_BLOCKS)
            with torch.cuda.stream(self._stream):
                first = torch.empty(1, dtype=torch.uint8, device=self._device)
            self.start([first])
        self.finish()

    def start(self, parts: Sequence[Tensor]) -> None:
        """Queue a transfer on the link's stream."""
        deadline = time.monotonic() + POST_S
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if self._receives:
                self._communicator.recv_parts(parts, SENDER, deadline)
            else:
                self._communicator.send_parts(parts, RECEIVER, deadline)
            self._through.record(self._stream)

    def finish(self) -> None:
        """Wait until the transfer is complete. Raise PeerLost if the link was aborted."""
        self._through.synchronize()
        if self._communicator.aborted:
            raise PeerLost("the other GPU's process has gone")

    def abort(self) -> None:
        """Abort the current transfer, also on the GPU."""
        self._communicator.abort()

    def close(self) -> None:
        """Abort the link, and keep its stream for another link."""
        self.abort()
        self._own_stream.close()

    def new_event(self) -> torch.cuda.Event:
        """Return an event for which a thread can wait without keeping a CPU core busy."""
        return torch.cuda.Event(blocking=True)
