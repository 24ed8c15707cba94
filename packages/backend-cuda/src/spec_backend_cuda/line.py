"""Line: a way for bytes from one sender's device to one receiver's, for memory that is pushed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class Line(ABC):
    """One thread of each end uses it, which may wait; any thread may abort it."""

    @abstractmethod
    def open(self) -> None:
        """Returns when both ends are there. PeerLost once aborted, DeadlineExceeded where the other does not come."""

    @abstractmethod
    def start(self, parts: Sequence[Tensor]) -> None:
        """Queues a transfer, without waiting for the other end: this end sends, or receives, as it was made to. Both
        give tensors of the same sizes, which nothing else uses until ``finish``."""

    @abstractmethod
    def finish(self) -> None:
        """Returns when what was started is through: a sender's tensors are free again then, a receiver's are filled.
        PeerLost once aborted: nothing is known of what they hold."""

    @abstractmethod
    def abort(self) -> None:
        """Ends what is under way, on the device too. Idempotent, and the only call that is still allowed after it is
        ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Aborts, and gives back what the line has; after the last call of the thread that uses it. Idempotent."""

    @abstractmethod
    def new_event(self) -> torch.cuda.Event:
        """One on which a thread can rest until it comes."""
