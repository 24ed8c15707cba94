"""StateFolder: the files of a checkpoint's state, as a strategy writes and reads them.

Files are safetensors and JSON: reading a checkpoint runs nothing. When a call to write returns, the file is on the
disk. Writing raises OSError where there is no room; reading raises ArtifactError for a file that is damaged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor


class StateFolder(ABC):
    """The folder of one checkpoint's state, seen from one process."""

    path: Path
    digests: dict[str, str]
    """Digest of each file that this process has written, by its name."""

    @abstractmethod
    def write_tensors(
        self, name: str, tensors: Mapping[str, Tensor], check: Callable[[], None] | None = None
    ) -> None:
        """Write a safetensors file; tensors come to the CPU one at a time, so any device's will do.

        ``check`` is called before each tensor, and may raise to end the call.
        """

    @abstractmethod
    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether the folder has such a file."""

    @abstractmethod
    def open_tensors(self, name: str) -> Any:
        """Return an open safetensors file (``safetensors.safe_open``), to be used in a ``with`` statement."""

    @abstractmethod
    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Return every tensor of a safetensors file."""

    @abstractmethod
    def read_bytes(self, name: str) -> bytes:
        """Return the content of a file of at most 64 MiB."""

    @abstractmethod
    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object of a JSON file."""
