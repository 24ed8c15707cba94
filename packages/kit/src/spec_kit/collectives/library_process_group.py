"""LibraryProcessGroup is the base class of process groups over any library of collectives."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from spec_core import ProcessGroup
from spec_core.errors import ProtocolError


class CollectiveLibrary(Protocol):
    """The calls of one communicator, queued on the current stream. ``raw`` is uint8 [bytes], never empty.

    ``deadline``: time (``time.monotonic``) at which the host must have returned from the call, for libraries that
    need it.
    """

    def broadcast(self, raw: Tensor, src: int, deadline: float) -> None:
        """Fill ``raw`` on every rank with the bytes of ``raw`` on rank ``src``."""

    def send(self, raw: Tensor, dst: int, deadline: float) -> None:
        """Send ``raw`` to the rank ``dst``."""

    def recv(self, raw: Tensor, src: int, deadline: float) -> None:
        """Fill ``raw`` with the bytes that the rank ``src`` sends."""

    def all_gather(self, raw: Tensor, gathered: Tensor, deadline: float) -> None:
        """Fill ``gathered``, uint8 [ranks, bytes], with every rank's ``raw``."""

    def all_reduce(self, tensor: Tensor, deadline: float) -> None:
        """Sum ``tensor`` over the ranks in place; its dtype is one of the group's ``summable``."""


class LibraryProcessGroup(ProcessGroup):
    """Checks arguments, moves tensors as bytes, and skips the library for empty tensors (P1, P2, P4)."""

    summable: ClassVar[frozenset[torch.dtype]]
    """Dtypes that ``all_reduce`` sums."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        """Store this process's rank, the number of ranks, and the device."""
        self.rank = rank
        self.world_size = world_size
        self.device = device

    @abstractmethod
    def _call(
        self, name: str, size: int, peer: int | None = None, *, sends: bool = False
    ) -> AbstractContextManager[tuple[CollectiveLibrary, float]]:
        """Yield the library for a call, and the call's deadline; any failure ends the group (P6).

        ``peer``: the other rank of a ``send`` or ``recv``; None if all ranks make the call.
        """

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Fill the tensor on every rank with the tensor of rank ``src``."""
        raw = self._bytes(tensor)
        with self._call(f"broadcast {src}", raw.numel()) as (library, deadline):
            if raw.numel():
                library.broadcast(raw, src, deadline)

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send a tensor to the rank ``dst``."""
        raw = self._bytes(tensor)
        with self._call(f"send to rank {dst}", raw.numel(), dst, sends=True) as (library, deadline):
            if raw.numel():
                library.send(raw, dst, deadline)

    def recv(self, tensor: Tensor, src: int) -> None:
        """Fill the tensor with the tensor that the rank ``src`` sends."""
        raw = self._bytes(tensor)
        with self._call(f"recv from rank {src}", raw.numel(), src) as (library, deadline):
            if raw.numel():
                library.recv(raw, src, deadline)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of every rank, in rank order."""
        raw = self._bytes(tensor)
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        with self._call("all_gather", raw.numel()) as (library, deadline):
            if raw.numel():
                library.all_gather(raw, self._bytes(gathered).view(self.world_size, -1), deadline)
        return list(gathered.unbind())

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum the tensor over the ranks, in place."""
        self._check(tensor)
        if tensor.dtype not in self.summable:
            summable = ", ".join(sorted(map(str, self.summable)))
            raise ProtocolError(f"all_reduce cannot sum {tensor.dtype}; it sums {summable}")
        with self._call(f"all_reduce {tensor.dtype}", tensor.numel()) as (library, deadline):
            if tensor.numel():
                library.all_reduce(tensor, deadline)

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        with self._call("barrier", 0):
            pass

    def _bytes(self, tensor: Tensor) -> Tensor:
        self._check(tensor)
        return tensor.view(-1).view(torch.uint8)

    def _check(self, tensor: Tensor) -> None:
        if tensor.device != self.device or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else "strided"
            raise ProtocolError(
                f"the tensor is {layout} on {tensor.device}; it must be contiguous and on {self.device}"
            )
