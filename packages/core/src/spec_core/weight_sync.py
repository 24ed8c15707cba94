"""WeightSync: draft weights from the trainer to a live engine, all or nothing.

A push is a versioned manifest and a byte stream: prepare → transfer → verify → commit | abort. The old version
serves until commit.

Contract:

W1  Versions grow; ``prepare`` refuses one that is not newer than what serves (ProtocolError).
W2  ``prepare`` compares the manifest with the loaded draft: a missing, extra or misshapen tensor, or another
    vocabulary mapping, is refused before a byte moves.
W3  ``verify`` compares the digest of every tensor as received; a difference is a failed push.
W4  After a failed or aborted push, at any point and from either side, the old version serves and its digest is
    unchanged; the next push succeeds without a restart.
W5  ``commit`` swaps between two decoding rounds; the version that ``serving`` then reports is the one stamped in
    the same swap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a manifest; ``sha256`` is of its raw little-endian bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class WeightManifest:
    """What a push carries. ``target_digest`` ties a draft to the target that it was trained for."""

    version: int
    target_digest: str
    tensors: tuple[TensorEntry, ...]


class WeightSync(ABC):
    """See the module's contract: the receiving side, one per serving engine."""

    @abstractmethod
    def serving(self) -> int:
        """Version that answers requests now; 0 for the draft that the engine started with."""

    @abstractmethod
    def prepare(self, manifest: WeightManifest, timeout_s: float) -> None:
        """W1, W2."""

    @abstractmethod
    def transfer(self, tensors: Iterator[tuple[str, Tensor]], timeout_s: float) -> None:
        """Takes the tensors in the manifest's order into spare memory."""

    @abstractmethod
    def verify(self, timeout_s: float) -> None:
        """W3."""

    @abstractmethod
    def commit(self, timeout_s: float) -> None:
        """W5."""

    @abstractmethod
    def abort(self) -> None:
        """W4."""
