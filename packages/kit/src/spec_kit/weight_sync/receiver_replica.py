"""Define a replica of one rank in this process, and combine the statuses of ranks or replicas."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from spec_core import DraftReplica, ServingStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spec_core import UpdateId, UpdateRequest
    from spec_core.draft_replica import ReplicaCall
    from spec_kit.weight_sync.receiver import UpdateReceiver


class ReceiverReplica(DraftReplica):
    """A replica of one rank in this process; each call runs on the caller's thread."""

    num_ranks = 1

    def __init__(self, receiver: UpdateReceiver) -> None:
        """Pass every call on to ``receiver``."""
        self._receiver = receiver

    def call(self, name: ReplicaCall, argument: UpdateRequest | UpdateId | None) -> Future[ServingStatus]:
        """Call the receiver's method ``name``, and return a future that is already done."""
        future: Future[ServingStatus] = Future()
        method = getattr(self._receiver, name)
        try:
            future.set_result(method() if argument is None else method(argument))
        except Exception as error:  # noqa: BLE001 (the caller gets every error, by the future)
            future.set_exception(error)
        return future


def combined(statuses: Iterable[ServingStatus]) -> ServingStatus:
    """Return the status of a replica from the statuses of its ranks; it is quarantined if they differ."""
    all_of_them = list(statuses)
    first = all_of_them[0]
    updates = [status.update for status in all_of_them if status.update is not None]
    served = {(status.state, status.version, status.digest, status.update) for status in all_of_them}
    if len(served) == 1:
        return first
    states = ", ".join(
        f"rank {rank}: {status.state}, version {status.version}" for rank, status in enumerate(all_of_them)
    )
    return ServingStatus(
        state="quarantined",
        update=max(updates, key=lambda update: update.precedence, default=None),
        newest=newest_version(all_of_them) or None,
        reason=f"its ranks differ ({states})",
    )


def newest_version(statuses: Iterable[ServingStatus]) -> int:
    """Return the highest version in the statuses of ranks or replicas; 0 if none has a version."""
    versions = [version for status in statuses for version in (status.version, status.newest)]
    return max((version for version in versions if version is not None), default=0)
