"""P2PLink: interface that transfers bytes from a sender's device to a receiver's (``PushPool``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class P2PLink(ABC):
    """One side of a link. A single thread uses it and may wait in it; any thread may abort it."""

    @abstractmethod
    def open(self) -> None:
        """Return when sender and receiver are connected.

        Raise PeerLost if aborted, DeadlineExceeded if the other side does not connect.
        """

    @abstractmethod
    def start(self, parts: Sequence[Tensor]) -> None:
        """Queue a transfer without waiting for the other side; this side sends or receives, as constructed.

        Both sides pass tensors of the same sizes. Nothing else may use the tensors until ``finish`` returns.
        """

    @abstractmethod
    def finish(self) -> None:
        """Return when the transfer is complete: a sender's tensors may be reused, a receiver's are filled.

        Raise PeerLost if aborted; the tensors' contents are then undefined.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abort the current transfer, also on the device. Idempotent; only ``close`` may be called after it."""

    @abstractmethod
    def close(self) -> None:
        """Abort and free the link's resources, after the using thread's last call. Idempotent."""

    @abstractmethod
    def new_event(self) -> torch.cuda.Event:
        """Return an event for which a thread can wait without using a core."""
