"""A DraftReplica represents one serving engine to the publisher that updates the engine's draft.

An update goes through two phases. ``prepare`` makes every rank of the engine receive the new weights into a
spare copy, while the old ones serve; once the replicas have received them, ``commit`` exchanges the copies.

Contract (``spec_testing.DraftReplicaSuite`` quotes the numbers):

U1  Calls return at once; their futures end with the status after the call, or with EngineError if the call is
    refused.
U2  ``prepare`` begins on every rank: each connects to ``request.address`` and receives into its spare copy.
    Until ``commit`` the engine goes on answering requests, and drafts with the old version.
U3  ``commit`` takes effect between two steps of the engine, for all weights and on all ranks at once. It is refused
    unless every rank has received exactly this update; committing the same update again changes nothing.
U4  An update never changes the target.
U5  ``abort`` forgets an update that is not committed. ``revert`` undoes the last commit; it is possible until the
    next ``prepare``.
U6  An update is refused if its ``fence`` is lower than the last update's, or if the fence is equal and its
    ``number`` is not higher.
U7  When the time of the request is over, or the connection to the publisher breaks before the commit, the replica
    aborts by itself. Whatever fails, the old version is still served, and the next update succeeds without a restart.
U8  After a commit that failed halfway, the state is ``quarantined`` until an update is committed on all
    ranks. Until then the engine drafts with the old version, or not at all.
U9  A commit and a revert reset the acceptance counters. A server then counts only requests that begin later.
    Answers that begin after a commit or revert name the version served (``Generation.draft_version``).
U10 A version names one draft: an update is refused if its version was committed here with another digest. An
    update whose tensors hold NaN or infinity is refused, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Annotated, Literal

import pydantic

from spec_core.wire_record import WireRecord
from spec_core.wording import one_line

LARGEST_VERSION = (1 << 53) - 1
"""Largest version: the largest integer that every JSON parser reads exactly (2^53 − 1)."""

ServingState = Literal["idle", "prepared", "received", "committed", "aborted", "reverted", "quarantined"]
ReplicaCall = Literal["prepare", "commit", "abort", "revert", "status"]
"""Name of a method of DraftReplica that another process can call."""


class UpdateId(WireRecord):
    """Identifies one push of weights.

    ``number`` rises with each push of a publisher, even if a push repeats an older version.
    """

    group: str
    fence: int
    """Fencing number of the publisher; a later publisher has a higher number
    (``spec_kit.weight_sync.fence``)."""
    number: int

    @property
    def precedence(self) -> tuple[int, int]:
        """The key by which a rank orders updates: the publisher's fence, then the number (U6)."""
        return self.fence, self.number


class UpdateRequest(WireRecord):
    """The arguments that a rank needs to receive an update; small enough for any remote call."""

    update: UpdateId
    replica: str
    """The publisher's name for the replica. The replica's ranks send it when they connect."""
    address: str
    """``host:port`` at which the publisher listens."""
    token: Annotated[str, pydantic.Field(repr=False)]
    """Secret that a rank sends to the publisher to authenticate for this update."""
    seconds: Annotated[float, pydantic.Field(gt=0)]
    """Seconds left for the whole update when the request was sent."""


class ServingStatus(WireRecord):
    """The draft that a replica (or one of its ranks) serves, and the outcome of the replica's last update."""

    state: ServingState = "idle"
    version: Annotated[int, pydantic.Field(ge=0, le=LARGEST_VERSION)] | None = None
    """Version of the served draft; None if no publisher has pushed it."""
    digest: Annotated[str, pydantic.Field(max_length=128)] = ""
    """``Manifest.digest`` of the draft that is served."""
    update: UpdateId | None = None
    """The last update that was accepted."""
    newest: Annotated[int, pydantic.Field(ge=0, le=LARGEST_VERSION)] | None = None
    """Highest version that was ever committed here. The version of a different draft must be higher (U10)."""
    reason: Annotated[str, pydantic.AfterValidator(one_line)] = ""
    """The reason why the last update was aborted, or why the replica is quarantined."""


class DraftReplica(ABC):
    """One serving engine, as the publisher calls it; the module's docstring has the contract."""

    num_ranks: int
    """Number of engine processes that hold a shard of the draft. Each of them connects to the publisher."""

    def prepare(self, request: UpdateRequest) -> Future[ServingStatus]:
        """Begin to receive an update into the spare copy of every rank (U2)."""
        return self.call("prepare", request)

    def commit(self, update: UpdateId) -> Future[ServingStatus]:
        """Begin to serve the draft that was received (U3)."""
        return self.call("commit", update)

    def abort(self, update: UpdateId) -> Future[ServingStatus]:
        """Forget an update that is not committed (U5)."""
        return self.call("abort", update)

    def revert(self, update: UpdateId) -> Future[ServingStatus]:
        """Serve again the draft that was served before ``update`` was committed (U5)."""
        return self.call("revert", update)

    def status(self) -> Future[ServingStatus]:
        """Return the replica's status: the draft that it serves, and its last update."""
        return self.call("status", None)

    @abstractmethod
    def call(self, name: ReplicaCall, argument: UpdateRequest | UpdateId | None) -> Future[ServingStatus]:
        """Call the method called ``name`` with ``argument``, which is None for ``status`` (U1)."""
