"""OwnStream: a stream of a device that nobody else in this process uses meanwhile."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core.resource import Resource

if TYPE_CHECKING:
    import torch


class OwnStream(Resource):
    """``stream`` is its owner's alone until ``close``, which keeps it for another owner.

    torch never takes a stream back: it has 32 of each priority and assigns them in turn, so that two new ones may be
    one. An owner on whose stream a call has failed does not close it, and it is used no more.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _spare: ClassVar[defaultdict[tuple[torch.device, int], list[Any]]] = defaultdict(list)

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        """Take a stream of that device and priority; the lowest number is the highest priority."""
        import torch

        self._kind = device, priority
        self._closed = False
        with self._lock:
            spare = self._spare[self._kind]
            self.stream: Any = (
                spare.pop() if spare else torch.get_device_module(device).Stream(device, priority=priority)
            )

    def close(self) -> None:
        """Give the stream back."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._spare[self._kind].append(self.stream)
