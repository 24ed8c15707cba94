"""Delivery: one push to one replica, from the publisher's side."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from spec_core.draft_replica import UpdateOrder
from spec_core.errors import DeadlineExceeded, EngineError, RunError
from spec_core.foreign import cause
from spec_core.resource import Resource
from spec_kit.weight_sync.current_device import beside
from spec_kit.weight_sync.messages import Confirm, Endpoint, Loaded, Offer, VersionTaken

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from concurrent.futures import Future

    import torch
    from torch import Tensor

    from spec_core.draft_replica import DraftReplica, ServingStatus, UpdateId
    from spec_core.weight_manifest import Manifest
    from spec_core.weight_transport import WeightSender
    from spec_kit.weight_sync.publisher_link import ExpectedRanks, PublisherLink, RankEnd
    from spec_kit.weight_sync.transport_choice import TransportChoice

Outcome = Literal["committed", "aborted", "reverted", "quarantined"]

_ANSWER_S = 1.0
"""How long the reason of a rank's failure is waited for, once the transport has shown that there is one."""
_UNDO_S = 10.0
"""Longest wait for a busy replica to say whether a later trainer publishes there."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOutcome:
    """How one replica came out of a push."""

    state: Outcome
    """``aborted``: it serves what it served before. ``quarantined``: it may not, and does not count until it was
    pushed to anew."""
    transport: str = ""
    """Weight transport that was used; empty where it did not come to that."""
    not_taken: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why each other transport was not used, by name."""
    reason: str = ""
    """Why the update was not committed there."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Time of each part: ``prepare``, ``send``, ``load``, ``commit`` and ``confirm``; of these the slowest rank has
    taken ``receive`` (into the spare copy, while it was sent) and ``swap``."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """One version of the draft. Nobody changes its tensors."""

    manifest: Manifest
    weights: Mapping[str, Tensor]


class Delivery(Resource):
    """Takes one update through its phases at one replica; ``state`` is how far it has come.

    A phase that fails leaves its reason and does not raise: the other replicas go on.
    """

    def __init__(
        self,
        name: str,
        replica: DraftReplica,
        link: PublisherLink,
        choice: TransportChoice,
        device: torch.device,
    ) -> None:
        """Push to ``replica``, called ``name``, by one of the transports of ``choice``."""
        self.name, self.replica = name, replica
        self.state: Literal["pending", "received"] | Outcome = "pending"
        self.reason = self.transport = ""
        self.has_failed = False
        """Whether the replica itself is at fault: what it serves has to be asked."""
        self.version_is_taken = False
        """Whether another draft has the update's version there."""
        self.seconds: dict[str, float] = {}
        self.not_taken: Mapping[str, str] = {}
        self._link, self._choice, self._device = link, choice, device
        self._expected: ExpectedRanks | None = None
        self._sender: WeightSender | None = None
        self._cancelled = False

    def begin(self, update: UpdateId, payload: Payload, received_by: float, deadline: float) -> Self:
        """Take on a push that is received by the first time and over by ``deadline``.

        Its ranks may connect until ``close``.
        """
        self.update, self.payload = update, payload
        self._deadline, self._end = received_by, deadline
        self._expected = self._link.expect(update, self.name, self.replica.num_ranks)
        if self._cancelled:
            self._expected.cancel()
        return self

    def transfer(self) -> None:
        """Bring the update to all ranks; afterwards its state is ``received``, or ``aborted`` with a reason.

        The replica of an aborted update does not know of it before ``abort``.
        """
        try:
            with beside(self._device):
                with self._timed("prepare"):
                    ends = self._prepare()
                self._send(ends)
            self.state = "received"
        except Exception as error:  # noqa: BLE001 (a transport or a replica may raise anything)
            self.has_failed, self.version_is_taken = True, isinstance(error, VersionTaken)
            self._close_sender()
            self.state, self.reason = "aborted", cause(error)

    def commit(self) -> None:
        """Make the replica serve what it has received; afterwards ``committed``, or ``quarantined`` with a reason."""
        self._deadline = self._end
        try:
            with self._timed("commit"):
                status = settled(self.replica.commit(self.update), self._deadline, f"replica {self.name!r}")
            if (status.state, status.digest) != ("committed", self.payload.manifest.digest):
                raise EngineError(f"its state is {status.state} ({status.reason or 'no reason given'})")
            with self._timed("confirm"):
                self._confirm()
            self.state = "committed"
        except Exception as error:  # noqa: BLE001 (a replica may raise anything)
            self.has_failed = True
            self.state, self.reason = "quarantined", self._later_trainer(self.replica.status) or cause(error)

    def abort(self, reason: str) -> None:
        """Give up an update that is not committed; the replica serves on what it served."""
        taken_over = self._later_trainer(lambda: self.replica.abort(self.update))
        self.state, self.reason = "aborted", taken_over or reason

    def cancel(self) -> None:
        """Make a phase under way end soon; any thread may call it."""
        self._cancelled = True
        if self._expected is not None and self.state == "pending":
            self._expected.cancel()
        self._close_sender()

    def close(self) -> None:
        """End the connections to the ranks."""
        self._close_sender()
        if self._expected is not None:
            self._expected.close()

    def outcome(self) -> ReplicaOutcome:
        """Return how it ended."""
        assert self.state not in ("pending", "received")
        return ReplicaOutcome(
            state=self.state,
            transport=self.transport,
            not_taken=self.not_taken,
            reason=self.reason,
            seconds=dict(self.seconds),
        )

    def _prepare(self) -> list[RankEnd]:
        """Return the connections of all ranks, each of which has begun to receive."""
        assert self._expected is not None
        order = UpdateOrder(
            update=self.update,
            replica=self.name,
            address=self._link.address,
            token=self._expected.token,
            seconds=max(1e-3, self._end - time.monotonic()),
        )
        settled(self.replica.prepare(order), self._deadline, f"replica {self.name!r}")
        try:
            return self._expected.wait(self._deadline)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}{self._own_reason()}") from error

    def _later_trainer(self, ask: Callable[[], Future[ServingStatus]]) -> str:
        """Return that a later trainer publishes here, if the answer to a call says so; the call may fail."""
        now = time.monotonic()
        # A busy replica may take its time, but nobody waits long for one that has let the update's time pass.
        deadline = (
            now + _ANSWER_S if self._cancelled else max(now + _ANSWER_S, min(self._deadline, now + _UNDO_S))
        )
        with contextlib.suppress(Exception):
            last = settled(ask(), deadline, self.name).update
            if last is not None and last.fence > self.update.fence:
                return (
                    f"a trainer with fence {last.fence} publishes here; the one with fence {self.update.fence} "
                    "is over"
                )
        return ""

    def _own_reason(self) -> str:
        """Return in parentheses why the replica has given up by itself, such as an address that it cannot reach."""
        with contextlib.suppress(Exception):  # it may not answer either
            status = settled(self.replica.status(), time.monotonic() + _ANSWER_S, self.name)
            if status.update == self.update and status.state == "aborted":
                return f" ({status.reason})"
        return ""

    def _send(self, ends: Sequence[RankEnd]) -> None:
        manifest = self.payload.manifest
        self.transport, transport, self.not_taken = self._choice.towards(self.name, ends)
        for end in ends:
            offer = Offer(
                manifest=manifest, transport=self.transport, bucket_bytes=transport.config.bucket_bytes
            )
            end.post(offer, self._deadline)
        addresses = [end.expect(Endpoint, self._deadline).address for end in ends]
        weights, device = self.payload.weights, self._device
        self._sender = transport.sender(manifest, weights, addresses, device, self.name)
        try:
            with self._timed("send"):
                for end, address in zip(ends, self._sender.open(self._deadline), strict=True):
                    end.post(Endpoint(address=address), self._deadline)
                self._sender.send(self._deadline)
        except RunError:
            self._raise_reason_of(ends)
            raise
        with self._timed("load"):
            self._await_loaded(ends)

    def _close_sender(self) -> None:
        if (sender := self._sender) is not None:
            sender.close()

    def _raise_reason_of(self, ends: Sequence[RankEnd]) -> None:
        """Raise the error of a rank that has said why it failed."""
        now = time.monotonic()
        deadline = max(now, min(now + _ANSWER_S, self._deadline))
        for end in ends:
            with contextlib.suppress(DeadlineExceeded):
                end.expect(Loaded, deadline)

    def _confirm(self) -> None:
        """Return when each rank has said how long its commit took."""
        assert self._expected is not None
        ends = self._expected.wait(self._deadline)
        for end in ends:
            end.post(Confirm(), self._deadline)
        self._await_loaded(ends)

    def _await_loaded(self, ends: Sequence[RankEnd]) -> None:
        """Wait for what each rank says next, and note its times."""
        for end in ends:
            for part, seconds in end.expect(Loaded, self._deadline).seconds.items():
                self.seconds[part] = max(seconds, self.seconds.get(part, 0.0))

    @contextlib.contextmanager
    def _timed(self, part: str) -> Generator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = time.monotonic() - started


def settled(future: Future[ServingStatus], deadline: float, who: str) -> ServingStatus:
    """Return the result of a replica's call. Raise DeadlineExceeded where it does not come in time."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError as error:
        if future.done():  # the error is its own, or it has come just now
            return future.result()
        raise DeadlineExceeded(f"{who} did not answer before the deadline of the update") from error
