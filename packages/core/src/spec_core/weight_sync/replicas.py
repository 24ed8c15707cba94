"""Replicas that are made of receivers: those of this process, and the status of several ranks together."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from spec_core.draft_replica import DraftReplica, ServingStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from spec_core.draft_replica import UpdateId, UpdateOrder
    from spec_core.weight_sync.receiver import UpdateReceiver


class ReceiverReplica(DraftReplica):
    """A replica of one rank, in this process, whose calls run on the thread that asks for them."""

    num_ranks = 1

    def __init__(self, receiver: UpdateReceiver) -> None:
        """Hand every call to ``receiver``."""
        self._receiver = receiver

    def prepare(self, order: UpdateOrder) -> Future[ServingStatus]:
        """Begin to receive (U2)."""
        return _done(lambda: self._receiver.prepare(order))

    def commit(self, update: UpdateId) -> Future[ServingStatus]:
        """Serve what was received (U3)."""
        return _done(lambda: self._receiver.commit(update))

    def abort(self, update: UpdateId) -> Future[ServingStatus]:
        """Forget an update that is not committed (U5)."""
        return _done(lambda: self._receiver.abort(update))

    def revert(self, update: UpdateId) -> Future[ServingStatus]:
        """Undo the last commit (U5)."""
        return _done(lambda: self._receiver.revert(update))

    def status(self) -> Future[ServingStatus]:
        """Return what is served."""
        return _done(self._receiver.status)


def combined(statuses: Iterable[ServingStatus]) -> ServingStatus:
    """Return the status of a replica whose ranks have these: where they differ, it is quarantined."""
    all_of_them = list(statuses)
    first = all_of_them[0]
    served = {(status.state, status.version, status.digest, status.update) for status in all_of_them}
    if len(served) == 1:
        return first
    states = ", ".join(
        f"rank {rank}: {status.state}, version {status.version}" for rank, status in enumerate(all_of_them)
    )
    return ServingStatus(state="quarantined", update=first.update, reason=f"its ranks differ ({states})")


def _done(call: Callable[[], ServingStatus]) -> Future[ServingStatus]:
    future: Future[ServingStatus] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 (the caller gets every error, by the future)
        future.set_exception(error)
    return future
