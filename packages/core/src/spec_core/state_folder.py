"""A StateFolder has the files of a checkpoint's state, which a strategy writes and reads.

The application implements it. A strategy may rely on these clauses (``tests/unit/kit/sharding`` quotes the numbers):

F1  Files are safetensors and JSON, so reading a checkpoint executes no code. A name is a plain file name.
F2  When a write returns, the file is complete and flushed to disk, and its digest is in ``digests``. Writing raises
    OSError if the disk is full; such a file belongs to no checkpoint.
F3  Tensors may be on any device. They are copied to the CPU one at a time, and read into its memory.
F4  Reading raises ArtifactError, one line, for a file that is missing, damaged or above a bound.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor


class TensorFile(Protocol):
    """An open safetensors file, to be used in a ``with`` statement; ``safetensors.safe_open`` returns one."""

    def __enter__(self) -> Self:
        """Return the file."""
        ...

    def __exit__(self, kind: object, error: object, trace: object, /) -> object:
        """Close the file."""
        ...

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        ...

    def get_tensor(self, name: str) -> Tensor:
        """Read a whole tensor."""
        ...


class StateFolder(ABC):
    """The folder of one checkpoint's state, as one process reads and writes it."""

    path: Path
    digests: dict[str, str]
    """File name -> digest, for each file that this process has written."""

    @abstractmethod
    def write_tensors(
        self, name: str, tensors: Mapping[str, Tensor], check: Callable[[], None] | None = None
    ) -> None:
        """Write a safetensors file (F2, F3).

        ``check`` is called before each tensor is written; if it raises, the write ends.
        """

    @abstractmethod
    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file (F2)."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether the folder has a file called ``name``."""

    @abstractmethod
    def open_tensors(self, name: str) -> TensorFile:
        """Return an open safetensors file, whose tensors are read one by one (F4)."""

    @abstractmethod
    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Return every tensor of a safetensors file (F4)."""

    @abstractmethod
    def read_bytes(self, name: str) -> bytes:
        """Return the content of a file of at most 64 MiB (F4)."""

    @abstractmethod
    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object that a file holds (F4)."""
