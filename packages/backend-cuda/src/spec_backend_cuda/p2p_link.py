"""P2PLink is the interface that transfers bytes from a sender's to a receiver's device (``PushPool``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class P2PLink(ABC):
    """One side of a link. Only one thread uses it, and its calls may block; any thread may abort it."""

    @abstractmethod
    def open(self) -> None:
        """Wait until sender and receiver are connected.

        Raise PeerLost if the link is aborted, DeadlineExceeded if the other side does not connect.
        """

    @abstractmethod
    def start(self, parts: Sequence[Tensor]) -> None:
        """Queue a transfer without waiting for the other side.

        The constructor determines whether this side sends or receives.

        Both sides pass tensors of the same sizes. Nothing else may use the tensors until ``finish`` returns.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until the transfer is complete.

        Then the receiver's tensors are filled, and the sender's tensors may be reused. Raise PeerLost if the
        link is aborted; the tensors' contents are then undefined.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abort the current transfer, also on the device. Idempotent; only ``close`` may be called after it."""

    @abstractmethod
    def close(self) -> None:
        """Abort the link and free its resources, after the last call of the thread that uses it. Idempotent."""

    @abstractmethod
    def new_event(self) -> torch.cuda.Event:
        """Return an event for which a thread can wait without keeping a CPU core busy."""
