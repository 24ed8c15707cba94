"""Replicas that are made of receivers: those of this process, and the status of several ranks together."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from spec_core.draft_replica import DraftReplica, ServingStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spec_core.draft_replica import ReplicaCall, UpdateId, UpdateOrder
    from spec_kit.weight_sync.receiver import UpdateReceiver


class ReceiverReplica(DraftReplica):
    """A replica of one rank, in this process, whose calls run on the thread that asks for them."""

    num_ranks = 1

    def __init__(self, receiver: UpdateReceiver) -> None:
        """Hand every call to ``receiver``."""
        self._receiver = receiver

    def call(self, name: ReplicaCall, argument: UpdateOrder | UpdateId | None) -> Future[ServingStatus]:
        """Call the receiver's method of that name, and return when it has."""
        future: Future[ServingStatus] = Future()
        method = getattr(self._receiver, name)
        try:
            future.set_result(method() if argument is None else method(argument))
        except Exception as error:  # noqa: BLE001 (the caller gets every error, by the future)
            future.set_exception(error)
        return future


def combined(statuses: Iterable[ServingStatus]) -> ServingStatus:
    """Return the status of a replica whose ranks have these: where they differ, it is quarantined."""
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
    """Return the highest version that replicas report to have had; 0 where none has had one."""
    versions = [version for status in statuses for version in (status.version, status.newest)]
    return max((version for version in versions if version is not None), default=0)
