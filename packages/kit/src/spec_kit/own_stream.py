"""OwnStream is a device stream that has one owner in this process at a time."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

from spec_core.resource import Resource

if TYPE_CHECKING:
    import torch


class OwnStream(Resource):
    """Exclusive use of ``stream`` until ``close``, which returns it to a pool for the next owner.

    torch has 32 streams of each priority and assigns them in turn, so two new Stream objects may be the same
    stream. If a call on the stream has failed, the owner must not call ``close``; the stream is then never used
    again.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _spare: ClassVar[defaultdict[tuple[torch.device, int], list[Any]]] = defaultdict(list)

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        """Get a stream of ``device`` with ``priority``; a lower number is a higher priority."""
        import torch

        self._kind = device, priority
        self._closed = False
        with self._lock:
            spare = self._spare[self._kind]
            self.stream: Any = (
                spare.pop() if spare else torch.get_device_module(device).Stream(device, priority=priority)
            )

    def close(self) -> None:
        """Return the stream to the pool."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._spare[self._kind].append(self.stream)
