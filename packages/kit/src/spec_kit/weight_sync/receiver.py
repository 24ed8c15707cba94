"""UpdateReceiver receives and commits updates of the draft that an engine serves, in one rank.

Each update is received on a separate thread while the engine works; only ``DraftSlot.swap`` interrupts the engine.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from spec_core import ServingStatus
from spec_core.errors import EngineError, PeerLost, ProtocolError
from spec_core.foreign import cause
from spec_core.resource import Resource
from spec_kit.weight_sync.current_device import separate_stream
from spec_kit.weight_sync.digest import TensorDigests, dtype_name
from spec_kit.weight_sync.finite import FiniteCheck
from spec_kit.weight_sync.messages import (
    Confirm,
    Endpoint,
    Greeting,
    Loaded,
    Offer,
    UpdateChannel,
    VersionTaken,
)
from spec_kit.weight_sync.switch_interval import short_switch_interval

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from torch import Tensor

    from spec_core import Manifest, UpdateId, UpdateRequest, WeightReceiver, WeightTransport
    from spec_core.draft_replica import ServingState
    from spec_kit.weight_sync.draft_slot import DraftSlot

logger = logging.getLogger(__name__)

_KEPT_VERSIONS = 10_000
"""Largest number of versions whose digests are stored; they take some MB."""


class UpdateReceiver(Resource):
    """Receives and commits the updates of one group, in one rank; any thread may call it.

    An engine calls ``commit`` and ``revert`` between two of its steps. Each call returns the status after the
    call. It raises EngineError if the call is refused (``spec_core.draft_replica`` names the cases).
    """

    def __init__(
        self,
        slot: DraftSlot,
        transports: Mapping[str, WeightTransport],
        *,
        group: str = "default",
        rank: int = 0,
    ) -> None:
        """Update the draft in ``slot``. ``transports``: name -> weight transport; ``close`` closes them."""
        self.slot = slot
        self.transports = transports
        self.group = group
        self.rank = rank
        self._lock = threading.RLock()
        self._status = ServingStatus()
        self._transfer: _Transfer | None = None
        """The last update's transfer; its thread may still run."""
        self._replaced: ServingStatus | None = None
        """Status before the last commit; None if the spare copy does not hold the draft that was served then."""
        self._damage = ""
        """Why this rank was quarantined; empty again after the next successful commit or revert (U8)."""
        self._digests: dict[int, str] = {}
        """Committed version -> its digest, for the ``_KEPT_VERSIONS`` highest versions (U10)."""
        self._closed = False

    def prepare(self, request: UpdateRequest) -> ServingStatus:
        """Begin to receive an update; discard the previous update if it is not committed (U2, U6)."""
        with self._lock:
            if self._is(request.update, "prepared") or self._is(request.update, "received"):
                return self._status
            self._check(request.update)
            before, self._transfer = self._transfer, _Transfer(self, request, self._transfer)
            self._replaced = None
            self._set("prepared", update=request.update)
            if before is not None:  # only now: its publisher asks at once which update replaced it
                before.cancel()
            self._transfer.start()
            return self._status

    def commit(self, update: UpdateId) -> ServingStatus:
        """Swap in the received update, so that the engine drafts with it (U3)."""
        with self._lock:
            # A repeated call, after its first answer was lost, is no error.
            if self._is(update, "committed"):
                return self._status
            if not self._is(update, "received"):
                raise EngineError(f"update {update.number} cannot be committed: {self._account(update)}")
            assert self._transfer is not None
            served = self._transfer.manifest
            replaced = self._status
            try:
                with self._transfer.timed("swap"):
                    self.slot.swap()
            except Exception as error:
                self._quarantine(f"the swap failed: {cause(error)}")
                raise EngineError(f"update {update.number}: {self._status.reason}") from error
            # After a failed swap the spare copy may be damaged, so there is no way back to it.
            self._replaced = None if self._damage else replaced
            self._damage = ""
            self._bind(served)
            newest = max(self._digests)
            self._set("committed", version=served.version, digest=served.digest, newest=newest)
            return self._status

    def revert(self, update: UpdateId) -> ServingStatus:
        """Serve again the draft that was served before the commit of ``update`` (U5)."""
        with self._lock:
            if self._is(update, "reverted"):
                return self._status
            replaced = self._replaced
            if replaced is None or update != self._status.update:
                raise EngineError(f"update {update.number} cannot be reverted: {self._account(update)}")
            # Before the swap: if it fails, nobody knows which draft is where, and a second try must be refused.
            self._replaced = None
            try:
                self.slot.swap()
            except Exception as error:
                self._quarantine(f"the swap back failed: {cause(error)}")
                raise EngineError(f"update {update.number}: {self._status.reason}") from error
            self._damage = ""
            self._set("reverted", version=replaced.version, digest=replaced.digest)
            return self._status

    def abort(self, update: UpdateId) -> ServingStatus:
        """Discard an update that is not committed (U5)."""
        with self._lock:
            self.give_up(update, "the publisher gave it up")
            return self._status

    def status(self) -> ServingStatus:
        """Return which draft this rank serves, and the state of its last update."""
        return self._status

    @contextlib.contextmanager
    def unchanged(self) -> Generator[ServingStatus]:
        """Yield the status; commits and reverts wait until the block ends."""
        with self._lock:
            yield self._status

    def forget(self) -> None:
        """Note that no pushed draft is served any more; after this call, the draft's memory may be freed.

        An update in progress is cancelled, and its thread ends first, because it writes into that memory.
        """
        with self._lock:
            transfer = self._transfer
            self._replaced = None
            self._damage = ""
            self._set("idle", version=None, digest="")
        if transfer is not None:
            transfer.cancel()
            transfer.join()

    def close(self) -> None:
        """Cancel an update in progress, and close the transports; the served draft does not change."""
        with self._lock:
            self._closed = True
            self._replaced = None
            transfer = self._transfer
            if transfer is not None:
                self.give_up(transfer.request.update, "the engine closes")
        if transfer is not None:
            transfer.cancel()  # also if the update is committed and its publisher is silent
            transfer.join()
        for transport in self.transports.values():
            transport.close()

    def has_received(self, update: UpdateId) -> None:
        """Note that the spare copy holds the whole update. Raise PeerLost if the update has been given up."""
        with self._lock:
            if not self._is(update, "prepared"):
                raise PeerLost(self._account(update))
            self._set("received")

    def check_version(self, manifest: Manifest) -> None:
        """Raise VersionTaken if the manifest's version was committed here with another digest (U10)."""
        known = self._digests.get(manifest.version, manifest.digest)
        if known != manifest.digest:
            raise VersionTaken(
                f"version {manifest.version} is another draft here, of digest {known}, and versions up to "
                f"{self._status.newest} are taken; push this one, of digest {manifest.digest}, under a higher version"
            )

    def give_up(self, update: UpdateId, reason: str) -> None:
        """Abort an update, unless it is committed or a later update has replaced it."""
        with self._lock:
            if self._is(update, "prepared") or self._is(update, "received"):
                assert self._transfer is not None
                self._transfer.cancel()
                if self._damage:
                    reason = f"{self._damage}; then: {reason}"
                self._set("quarantined" if self._damage else "aborted", reason=reason)

    def _bind(self, manifest: Manifest) -> None:
        """Store the digest of the manifest's version."""
        self._digests[manifest.version] = manifest.digest
        if len(self._digests) > _KEPT_VERSIONS:
            self._digests.pop(min(self._digests))

    def _quarantine(self, reason: str) -> None:
        self._damage = reason
        self._set("quarantined", reason=reason)

    def _check(self, update: UpdateId) -> None:
        last = self._status.update
        if self._closed:
            raise EngineError("the engine closes")
        if update.group != self.group:
            raise EngineError(f"update group {update.group!r} is not this one, {self.group!r}")
        if last is not None and update.fence < last.fence:
            raise EngineError(
                f"a trainer with fence {last.fence} publishes here; the one with fence {update.fence} is over"
            )
        if last is not None and update.precedence <= last.precedence:
            raise EngineError(f"update {update.number} is not newer than update {last.number}")

    def _is(self, update: UpdateId, state: ServingState) -> bool:
        return self._status.update == update and self._status.state == state

    def _account(self, update: UpdateId) -> str:
        """Return the state of ``update`` as text for error messages, without the reasons of other updates."""
        last, reason = self._status.update, self._status.reason
        if last is None:
            return "none was begun"
        if last != update:
            later = "a later trainer's" if last.fence > update.fence else "another"
            return f"{later} update has taken its place"
        return f"it is {self._status.state} ({reason})" if reason else f"it is {self._status.state}"

    def _set(self, state: ServingState, *, reason: str = "", **changes: object) -> None:
        self._status = self._status.model_copy(update={"state": state, "reason": reason, **changes})


class _Transfer:
    """Receives one update on a separate thread."""

    def __init__(self, owner: UpdateReceiver, request: UpdateRequest, before: _Transfer | None) -> None:
        self.request = request
        self._owner = owner
        self._before = before
        self._deadline = time.monotonic() + request.seconds
        self._cancelled = threading.Event()
        self._open: list[UpdateChannel | WeightReceiver] = []
        self._seconds: dict[str, float] = {}
        self._thread = threading.Thread(
            target=self._run, name=f"draft update {request.update.number}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def cancel(self) -> None:
        """Make the thread end soon; any thread may call it."""
        self._cancelled.set()
        for resource in list(self._open):
            resource.shutdown() if isinstance(resource, UpdateChannel) else resource.close()

    @contextlib.contextmanager
    def timed(self, part: str) -> Generator[None]:
        """Measure the block's seconds; the next message to the publisher reports them as ``part``."""
        started = time.monotonic()
        yield
        self._seconds[part] = time.monotonic() - started

    def _times(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _run(self) -> None:
        update = self.request.update
        try:
            if self._before is not None:  # it may still write into the spare copy
                self._before.join()
                self._before = None
            with (
                contextlib.closing(UpdateChannel.connect(self.request.address, self._deadline)) as channel,
                separate_stream(self._owner.slot.device),
                short_switch_interval(),
            ):
                self._receive(channel)
        except Exception as error:  # noqa: BLE001 (the top of a thread: an engine's loader may raise anything)
            logger.info("update %d of group %s ended: %s", update.number, update.group, cause(error))
            self._owner.give_up(update, cause(error))

    def _receive(self, channel: UpdateChannel) -> None:
        # Greet even if the update was given up meanwhile: the publisher waits for this, and then sees the end.
        channel.post(self._greeting(), self._deadline)
        self._register(channel)
        with contextlib.ExitStack() as ends:  # closed after the answer is sent, because closing may take time
            try:
                self._load(channel, ends)
            except Exception as error:
                channel.fail(error)
                raise
            self._owner.has_received(self.request.update)
            channel.post(Loaded(seconds=self._times()), self._deadline)
        # The engine was asked to commit by other means; this message only asks how long it took.
        channel.expect(Confirm, self._deadline)  # raises if the connection ends unconfirmed
        channel.post(Loaded(seconds=self._times()), self._deadline)

    def _load(self, channel: UpdateChannel, ends: contextlib.ExitStack) -> None:
        """Receive the update into the spare copy of the draft.

        The transport's receiver stays open until the caller closes the exit stack ``ends``.
        """
        slot = self._owner.slot
        offer = channel.expect(Offer, self._deadline)
        self.manifest = offer.manifest
        slot.layout().check(self.manifest)
        self._owner.check_version(self.manifest)
        transport = self._owner.transports[offer.transport]
        receiver = ends.enter_context(transport.receiver(self.manifest, slot.device, offer.bucket_bytes))
        self._register(receiver)
        channel.post(Endpoint(address=receiver.address), self._deadline)
        sender = channel.expect(Endpoint, self._deadline).address
        arriving = self._checked(receiver.receive(sender, self._deadline))
        with self.timed("receive"), channel.watched(self.cancel):
            slot.load(arriving)
            if (left := next(arriving, None)) is not None:
                raise EngineError(f"the engine did not load {left[0]}")

    def _greeting(self) -> Greeting:
        owner, request = self._owner, self.request
        locations: dict[str, str] = {}
        unusable: dict[str, str] = {}
        for name, transport in owner.transports.items():
            try:
                locations[name] = transport.location(owner.slot.device)
            except Exception as error:  # noqa: BLE001 (the publisher waits for this rank, and may take another)
                unusable[name] = cause(error)
        return Greeting(
            token=request.token,
            update=request.update,
            replica=request.replica,
            rank=owner.rank,
            locations=locations,
            unusable=unusable,
        )

    def _checked(self, weights: Iterator[tuple[str, Tensor]]) -> Generator[tuple[str, Tensor]]:
        """Yield the arriving tensors, each tensor of the manifest once; check all bytes at the end.

        So there are only two device synchronizations. If a tensor is damaged, the error comes after it was
        loaded into the spare copy, but that copy is then never served.
        """
        missing = {entry.name: entry for entry in self.manifest.tensors}
        digests, finite = TensorDigests(), FiniteCheck()
        for name, tensor in finite.watch(weights):
            if self._cancelled.is_set():
                raise PeerLost("the update was given up")
            if (expected := missing.pop(name, None)) is None:
                raise ProtocolError(f"{name} has arrived twice, or is none of the update")
            dtype = dtype_name(tensor)
            shape = tuple(tensor.shape)
            if (dtype, shape) != (expected.dtype, expected.shape):
                raise ProtocolError(
                    f"{name} has arrived as {dtype} {list(shape)}, expected {expected.dtype} {list(expected.shape)}"
                )
            digests.add([(name, tensor)])
            yield name, tensor
        if missing:
            raise ProtocolError(f"{', '.join(sorted(missing))} did not arrive")
        expected_digests = {entry.name: entry.digest for entry in self.manifest.tensors}
        for name, digest in ((entry.name, entry.digest) for entry in digests.entries()):
            if digest != expected_digests[name]:
                raise ProtocolError(
                    f"{name} has arrived with digest {digest}, expected {expected_digests[name]}"
                )
        if problem := finite.problem():
            raise EngineError(problem)

    def _register(self, resource: UpdateChannel | WeightReceiver) -> None:
        self._open.append(resource)
        if self._cancelled.is_set():
            self.cancel()
