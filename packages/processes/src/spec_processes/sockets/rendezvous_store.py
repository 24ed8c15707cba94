"""A RendezvousStore is a key-value store for torch's process groups, kept by the rendezvous server."""

# torch.distributed declares no __all__, so its classes count as private names of another module.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable

from torch.distributed import Store

from spec_core.errors import DeadlineExceeded
from spec_processes.sockets.rendezvous_server import StoreRequest

_POLL_S = 0.01
"""Seconds between two requests for a key that another member has not set yet."""


class RendezvousStore(Store):
    """Implements the methods of a store that torch's process groups call. Any thread may call it."""

    def __init__(self, ask: Callable[[StoreRequest], str | None], timeout_s: float) -> None:
        """Store ``ask``, which sends a request to the server and returns its answer.

        ``timeout_s``: longest wait for a key.
        """
        super().__init__()
        self._ask = ask
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        text = value if isinstance(value, str) else value.decode("latin-1")
        self._ask(StoreRequest(act="set", key=key, value=text))

    def get(self, key: str) -> bytes:
        """Wait until a key is set and return its value. Raise DeadlineExceeded at the timeout."""
        self.wait([key])
        return (self._ask(StoreRequest(act="get", key=key)) or "").encode("latin-1")

    def add(self, key: str, value: int) -> int:
        """Add ``value`` to the key's number, which is 0 at first, and return the sum."""
        return int(self._ask(StoreRequest(act="add", key=key, value=str(value))) or 0)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""
        return all(self._ask(StoreRequest(act="get", key=key)) is not None for key in keys)

    def wait(self, keys: list[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until all keys are set. Raise DeadlineExceeded at the timeout."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"no member of the group has set {keys} within {limit_s} s")
            time.sleep(_POLL_S)
