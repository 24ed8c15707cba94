"""A StateFolder has the files of a checkpoint's state, which a strategy writes and reads.

Files are safetensors and JSON, so reading a checkpoint executes no code. When a write returns, the file has
been flushed to disk. Writing raises OSError if the disk is full; reading raises ArtifactError for a damaged
file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor


class StateFolder(ABC):
    """The folder of one checkpoint's state, as one process reads and writes it."""

    path: Path
    digests: dict[str, str]
    """File name -> digest, for each file that this process has written."""

    @abstractmethod
    def write_tensors(
        self, name: str, tensors: Mapping[str, Tensor], check: Callable[[], None] | None = None
    ) -> None:
        """Write a safetensors file. Tensors may be on any device; they are copied to the CPU one at a time.

        ``check`` is called before each tensor is written; if it raises, the write ends.
        """

    @abstractmethod
    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether the folder has a file called ``name``."""

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
        """Return the JSON object that a file holds."""
