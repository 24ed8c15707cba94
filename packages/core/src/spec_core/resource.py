"""A Resource is an object that holds memory, sockets, threads or processes and must be closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Resource(ABC):
    """A context manager whose ``close`` may be called any number of times."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that the object holds. The interface's contract describes the state afterwards."""

    def __enter__(self) -> Self:
        """Return the object."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the object."""
        self.close()
