"""P2PLink: a way for bytes from one sender's device to one receiver's (``PushPool``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class P2PLink(ABC):
    """One thread of each end uses it, which may wait; any thread may abort it."""

    @abstractmethod
    def open(self) -> None:
        """Return when both ends are there.

        Raise PeerLost once aborted, DeadlineExceeded where the other end does not come.
        """

    @abstractmethod
    def start(self, parts: Sequence[Tensor]) -> None:
        """Queue a transfer, without waiting for the other end; this end sends or receives, as it was made to.

        Both ends give tensors of the same sizes, which nothing else uses until ``finish``.
        """

    @abstractmethod
    def finish(self) -> None:
        """Return when the transfer is complete: a sender's tensors are free again, a receiver's are filled.

        Raise PeerLost once aborted: what the tensors hold is not known then.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the current transfer, on the device too. Idempotent; only ``close`` may be called after it."""

    @abstractmethod
    def close(self) -> None:
        """Abort, and give back what the link holds; after the last call of the thread that uses it. Idempotent."""

    @abstractmethod
    def new_event(self) -> torch.cuda.Event:
        """Return an event for which a thread can wait without using a core."""
