"""Resource: whatever holds memory, sockets, threads or processes is closed, by a ``with`` block if possible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Resource(ABC):
    """A context manager whose ``close`` may be called any number of times."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything; what the interface's contract says of it holds afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
