"""A Rendezvous forms a group of processes on one or more hosts, which exchange small records.

It is independent of every torch process group; device collectives (``ProcessGroup``) are built on top of it.

Contract (the tests quote the numbers):

R1  Rank 0 listens as soon as it is constructed, on loopback by default, and ``address`` then names the real port.
    The other ranks connect in ``join``. IPv6 works: ``[::1]:0``.
R2  A connection's first record has the group's secret token. A connection with another token is refused before
    anything else happens: the caller's ``join`` raises ProtocolError, and the group is not affected.
R3  ``join`` waits until all ranks have joined; from then on nobody listens at ``address``. A rank that is taken or
    out of range, or another world size, raises ProtocolError in the process that asks for it.
R4  ``barrier``, ``broadcast``, ``all_gather`` wait until every rank has made the same call; calls that differ
    raise ProtocolError. Payloads are bytes or JSON, never pickle.
R5  Every call ends within ``timeout_s``: DeadlineExceeded names the ranks that are missing, also if rank 0
    itself is silent. After any error but a mistaken argument the rendezvous is unusable.
R6  If a member dies or closes, every other rank that waits or makes a call raises PeerLost, which names the
    member's rank.
R7  ``store`` returns a key-value store for torch's own groups, with a separate namespace for each call. The store is
    a file in rank 0's memory, which only this user's processes on this host can open. If a member cannot open the
    file, the store uses the rendezvous's connections, and exists as long as the rendezvous.
R8  ``close`` is idempotent, needs no other rank and leaves no socket and no thread.
"""

# torch.distributed declares no __all__, so its classes count as private names of another module.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from spec_core.resource import Resource

if TYPE_CHECKING:
    import torch


class Rendezvous(Resource):
    """One rank's membership in a group; the module's docstring has the contract.

    Only one thread of a rank may use it at a time.
    """

    rank: int
    world_size: int
    timeout_s: float
    """Longest duration of a call, in seconds."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Return ``host:port`` of rank 0 (R1)."""

    @property
    @abstractmethod
    def interface(self) -> str:
        """Return this process's address on the network of the members; it is known only after ``join``."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called ``barrier`` (R4)."""

    @abstractmethod
    def broadcast(self, payload: bytes | None, src: int) -> bytes:
        """Return the payload of rank ``src``; the payloads of other ranks are ignored (R4)."""

    @abstractmethod
    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in rank order (R4)."""

    @abstractmethod
    def all_gather_json(self, value: object) -> list[Any]:
        """Return the JSON values of all ranks, in rank order."""

    @abstractmethod
    def store(self, name: str) -> torch.distributed.Store:
        """Return a key-value store for torch's process groups.

        Every rank must call it. The store is valid while the rendezvous is open (R7).
        """
