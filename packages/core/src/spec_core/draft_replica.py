"""DraftReplica: one serving engine as the publisher of a draft's weights sees it.

An update goes through two phases. ``prepare`` makes every rank of the engine receive the new weights into a spare
copy, while the old ones serve; once the replicas have received them, ``commit`` exchanges the copies.

Contract (``spec_testing.DraftReplicaSuite`` quotes the numbers):

U1  Calls return at once; their futures end with the status after the call, or with EngineError where it is refused.
U2  ``prepare`` begins on every rank: each connects to ``order.address`` and receives into its spare copy. Until
    ``commit`` the engine drafts with the old version, and answers go on.
U3  ``commit`` takes effect between two steps of the engine, whole, on all ranks. It is refused unless every rank has
    received exactly this update; the same commit twice is one.
U4  An update never changes the target.
U5  ``abort`` forgets an update that is not committed; ``revert`` undoes the last commit, until another ``prepare``.
U6  A lower ``fence`` than one that was seen before, and a ``number`` that is not higher, are refused.
U7  When the order's time is over, or the connection to the publisher breaks before the commit, the replica aborts by
    itself. Whatever fails, the old version goes on, and the next update succeeds without a restart.
U8  After a commit that failed in the midst, the state is ``quarantined``, until an update is committed whole: the
    engine drafts with the old version, or not at all.
U9  Acceptance counts anew from a commit and from a revert; a server counts requests alone that begin later. Answers
    that begin after one name what it serves (``Generation.draft_version``).
U10 A version names one draft: an update is refused whose version was committed here with another digest. So is one
    whose tensors hold NaN or infinity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from spec_core.wire_record import WireRecord
from spec_core.wording import one_line

if TYPE_CHECKING:
    from concurrent.futures import Future

LARGEST_VERSION = (1 << 53) - 1
"""Every reader of JSON knows such a number exactly."""

ServingState = Literal["idle", "prepared", "received", "committed", "aborted", "reverted", "quarantined"]
ReplicaCall = Literal["prepare", "commit", "abort", "revert", "status"]
"""The calls of DraftReplica, by name."""


class UpdateId(WireRecord):
    """The name of one push. ``number`` orders the pushes of a publisher, also where one repeats an older version."""

    group: str
    fence: int
    """The publisher's place among those that have pushed to the replica (``spec_kit.weight_sync.fence``)."""
    number: int

    @property
    def precedence(self) -> tuple[int, int]:
        """The order of updates for a rank: the trainer's fence, then the number (U6)."""
        return self.fence, self.number


class UpdateOrder(WireRecord):
    """All that a rank needs to take part in an update; small enough for any remote call."""

    update: UpdateId
    replica: str
    """The publisher's name for the replica, which its ranks repeat."""
    address: str
    """``host:port`` at which the publisher listens."""
    token: Annotated[str, pydantic.Field(repr=False)]
    """Secret of this update."""
    seconds: Annotated[float, pydantic.Field(gt=0)]
    """Time left for the whole update when the order was given."""


class ServingStatus(WireRecord):
    """Which draft a replica, or one rank of it, serves, and how its last update ended."""

    state: ServingState = "idle"
    version: Annotated[int, pydantic.Field(ge=0, le=LARGEST_VERSION)] | None = None
    """Version of the draft that is served; None while none that a publisher has pushed is."""
    digest: Annotated[str, pydantic.Field(max_length=128)] = ""
    """``Manifest.digest`` of the draft that is served."""
    update: UpdateId | None = None
    """The last order that was accepted."""
    newest: Annotated[int, pydantic.Field(ge=0, le=LARGEST_VERSION)] | None = None
    """Highest version that was ever committed here: one for another draft must be higher (U10)."""
    reason: Annotated[str, pydantic.AfterValidator(one_line)] = ""
    """Why the last update was aborted, or the replica is quarantined."""


class DraftReplica(ABC):
    """One serving engine; the module has the contract. Implementations say how a call gets there."""

    num_ranks: int
    """Processes of the engine that hold a part of the draft: each connects to the publisher."""

    def prepare(self, order: UpdateOrder) -> Future[ServingStatus]:
        """Begin to receive an update into the spare copy of every rank (U2)."""
        return self.call("prepare", order)

    def commit(self, update: UpdateId) -> Future[ServingStatus]:
        """Serve what was received (U3)."""
        return self.call("commit", update)

    def abort(self, update: UpdateId) -> Future[ServingStatus]:
        """Forget an update that is not committed (U5)."""
        return self.call("abort", update)

    def revert(self, update: UpdateId) -> Future[ServingStatus]:
        """Serve again what was served before ``update`` was committed (U5)."""
        return self.call("revert", update)

    def status(self) -> Future[ServingStatus]:
        """Return what is served."""
        return self.call("status", None)

    @abstractmethod
    def call(self, name: ReplicaCall, argument: UpdateOrder | UpdateId | None) -> Future[ServingStatus]:
        """Begin the call of that name; its argument is that of the method, None for ``status`` (U1)."""
