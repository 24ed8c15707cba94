"""Delivery carries out one push to one replica, on the publisher's side."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

from spec_core import UpdateRequest
from spec_core.errors import DeadlineExceeded, EngineError, RunError
from spec_core.foreign import cause
from spec_core.resource import Resource
from spec_kit.weight_sync.current_device import separate_stream
from spec_kit.weight_sync.messages import Confirm, Endpoint, Loaded, Offer, VersionTaken

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from concurrent.futures import Future

    import torch
    from torch import Tensor

    from spec_core import DraftReplica, Manifest, ServingStatus, UpdateId, WeightSender
    from spec_kit.weight_sync.publisher_link import ExpectedRanks, PublisherLink, RankEnd
    from spec_kit.weight_sync.transport_choice import TransportChoice

Outcome = Literal["committed", "aborted", "reverted", "quarantined"]

_ANSWER_S = 1.0
"""Seconds to wait for the reason of a rank's failure, after the transport has failed."""
_UNDO_S = 10.0
"""Longest time in seconds to wait until a busy replica reports whether a later trainer publishes to it."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOutcome:
    """The result of a push at one replica."""

    state: Outcome
    """``aborted``: the replica serves its previous version. ``quarantined``: it is not certain which version the
    replica serves; the publisher leaves it out until it serves the newest version."""
    transport: str = ""
    """Name of the weight transport that was used; empty if none was chosen."""
    not_taken: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of each other transport -> why it was not used."""
    reason: str = ""
    """Why the update was not committed; empty if it was."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds of each phase: ``prepare``, ``send``, ``load``, ``commit`` and ``confirm``. It also has the slowest
    rank's seconds of ``receive`` (into the spare copy, during ``send`` and ``load``) and ``swap`` (during
    ``commit``)."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Manifest and tensors of one version of the draft. The tensors must not be changed."""

    manifest: Manifest
    weights: Mapping[str, Tensor]


class Delivery(Resource):
    """Takes one update through its phases at one replica; ``state`` is the result of the last phase.

    A phase that fails sets ``reason`` and does not raise, so that other replicas are not affected.
    """

    def __init__(
        self,
        name: str,
        replica: DraftReplica,
        link: PublisherLink,
        choice: TransportChoice,
        device: torch.device,
    ) -> None:
        """Prepare a push to ``replica``, called ``name``, by one of the transports of ``choice``."""
        self.name = name
        self.replica = replica
        self.state: Literal["pending", "received"] | Outcome = "pending"
        self.reason = self.transport = ""
        self.has_failed = False
        """Whether a call to the replica failed, so that it must be asked which version it serves."""
        self.version_is_taken = False
        """Whether the replica has already committed another draft under the update's version."""
        self.seconds: dict[str, float] = {}
        self.not_taken: Mapping[str, str] = {}
        self._link = link
        self._choice = choice
        self._device = device
        self._expected: ExpectedRanks | None = None
        self._sender: WeightSender | None = None
        self._cancelled = False

    def begin(self, update: UpdateId, payload: Payload, received_by: float, deadline: float) -> Self:
        """Start a push that must be received by the time ``received_by`` and finished by ``deadline``.

        Both are times of ``time.monotonic``. The replica's ranks may connect until ``close``.
        """
        self.update = update
        self.payload = payload
        self._deadline = received_by
        self._end = deadline
        self._expected = self._link.expect(update, self.name, self.replica.num_ranks)
        if self._cancelled:
            self._expected.cancel()
        return self

    def transfer(self) -> None:
        """Send the update to all ranks; afterwards ``state`` is ``received``, or ``aborted`` with a reason.

        After a failure, ``abort`` must be called to inform the replica.
        """
        try:
            with separate_stream(self._device):
                with self._timed("prepare"):
                    ends = self._prepare()
                self._send(ends)
            self.state = "received"
        except Exception as error:  # noqa: BLE001 (a transport or a replica may raise anything)
            self.has_failed = True
            self.version_is_taken = isinstance(error, VersionTaken)
            self._close_sender()
            self.reason = cause(error)
            self.state = "aborted"

    def commit(self) -> None:
        """Make the replica serve the update. ``state`` becomes ``committed``, or ``quarantined`` on failure."""
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
            self.reason = self._later_trainer(self.replica.status) or cause(error)
            self.state = "quarantined"

    def abort(self, reason: str) -> None:
        """Abort an update that is not committed; the replica continues to serve its current version."""
        taken_over = self._later_trainer(lambda: self.replica.abort(self.update))
        self.reason = taken_over or reason
        self.state = "aborted"

    def cancel(self) -> None:
        """Interrupt the current phase of the push. Thread-safe."""
        self._cancelled = True
        if self._expected is not None and self.state == "pending":
            self._expected.cancel()
        self._close_sender()

    def close(self) -> None:
        """Close the connections to the ranks."""
        self._close_sender()
        if self._expected is not None:
            self._expected.close()

    def outcome(self) -> ReplicaOutcome:
        """Return the result of the finished push."""
        assert self.state not in ("pending", "received")
        return ReplicaOutcome(
            state=self.state,
            transport=self.transport,
            not_taken=self.not_taken,
            reason=self.reason,
            seconds=dict(self.seconds),
        )

    def _prepare(self) -> list[RankEnd]:
        """Call ``prepare`` on the replica, and return the connections of all its ranks."""
        assert self._expected is not None
        request = UpdateRequest(
            update=self.update,
            replica=self.name,
            address=self._link.address,
            token=self._expected.token,
            seconds=max(1e-3, self._end - time.monotonic()),
        )
        settled(self.replica.prepare(request), self._deadline, f"replica {self.name!r}")
        try:
            return self._expected.wait(self._deadline)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}{self._own_reason()}") from error

    def _later_trainer(self, ask: Callable[[], Future[ServingStatus]]) -> str:
        """Return an error message if a later trainer publishes to this replica, else an empty string.

        ``ask`` calls the replica and returns its future status, which names the replica's last update. The call
        may fail.
        """
        now = time.monotonic()
        # A busy replica may answer late, but the wait is short if the update's deadline has passed already.
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
        """Return in parentheses why the replica itself aborted, such as an unreachable address, or nothing."""
        with contextlib.suppress(Exception):  # the replica may not answer this call either
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
        self._sender = transport.sender(manifest, self.payload.weights, addresses, self._device, self.name)
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
        """Raise the error that a failed rank has sent, if any."""
        now = time.monotonic()
        deadline = max(now, min(now + _ANSWER_S, self._deadline))
        for end in ends:
            with contextlib.suppress(DeadlineExceeded):
                end.expect(Loaded, deadline)

    def _confirm(self) -> None:
        """Wait until each rank has sent the times of its commit, and record the times."""
        assert self._expected is not None
        ends = self._expected.wait(self._deadline)
        for end in ends:
            end.post(Confirm(), self._deadline)
        self._await_loaded(ends)

    def _await_loaded(self, ends: Sequence[RankEnd]) -> None:
        """Wait for each rank's next message, and record the times in it."""
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
    """Return the result of a call to a replica. Raise DeadlineExceeded if there is none at ``deadline``."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError as error:
        if future.done():  # the call itself timed out, or it has just ended
            return future.result()
        raise DeadlineExceeded(f"{who} did not answer before the deadline of the update") from error
