"""Publisher pushes new weights of one draft to any number of replicas, in two phases.

First, every replica receives the version into its spare copy. Then each replica that has received it commits
it, even if others have failed. A replica at which something failed is quarantined until it is known to serve
the newest version. After this push and after each later push, the publisher asks such a replica which draft
it serves, and pushes the newest version to it if needed. No caller waits for that. So all replicas that are
not quarantined serve the same version.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from spec_core import LARGEST_VERSION, DraftReplica, Manifest, ServingStatus, UpdateId, WeightTransport
from spec_core.errors import ConfigError, EngineError, RunError
from spec_core.foreign import cause
from spec_core.resource import Resource
from spec_core.weight_manifest import TensorEntry
from spec_kit.weight_sync.current_device import queued_before, separate_stream
from spec_kit.weight_sync.delivery import Delivery, Payload, ReplicaOutcome, settled
from spec_kit.weight_sync.digest import tensor_entries
from spec_kit.weight_sync.fence import fence_after, random_bits
from spec_kit.weight_sync.finite import FiniteCheck
from spec_kit.weight_sync.publisher_link import PublisherLink
from spec_kit.weight_sync.push import Push
from spec_kit.weight_sync.receiver_replica import newest_version
from spec_kit.weight_sync.transport_choice import TransportChoice

logger = logging.getLogger(__name__)

R = TypeVar("R")

_REPAIR_S = 30.0
"""Longest time, in seconds, to bring one quarantined replica to the newest version."""
_STATUS_S = 2.0
"""Longest wait, in seconds, for the status of a quarantined replica."""
_SETTLED = ("idle", "committed", "aborted", "reverted")
"""States in which a replica refuses a late commit and serves an undamaged draft."""


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """The result of a push."""

    version: int
    digest: str
    """``Manifest.digest`` of the version."""
    committed: bool
    """Whether at least one replica has committed the version; also True if there are no replicas."""
    num_bytes: int
    replicas: Mapping[str, ReplicaOutcome]
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds of each phase: ``manifest``, ``transfer``, ``commit`` or ``abort``; and ``total``."""


@dataclass(kw_only=True)
class _Member:
    """The publisher's knowledge of one replica."""

    replica: DraftReplica
    fence: int
    """The fence that this publisher sends to the replica with each update."""
    counts: bool = True
    """Whether the replica is known to serve the newest committed version."""
    update: UpdateId | None = None
    """The last push that the replica has committed; ``revert`` undoes it."""


_LEFT_OUT = ReplicaOutcome(
    state="quarantined", reason="an earlier update failed there; it gets the newest version after this push"
)


class Publisher(Resource):
    """Pushes weights to the replicas of one update group; only ``serving``, ``next_version`` and ``close`` block."""

    def __init__(
        self,
        transports: Mapping[str, WeightTransport],
        target: str,
        *,
        group: str = "default",
        fence: int | None = None,
        device: torch.device | None = None,
        address: str = "127.0.0.1:0",
        fastest_first: bool = False,
    ) -> None:
        """Publish drafts of the target with digest ``target``, by the first transport that reaches a replica.

        With ``fastest_first``, use the transport whose ``medium`` is fastest, or the first of several that
        are equally fast. Ranks connect to ``address``. A replica that has seen a higher ``fence`` refuses
        this publisher. The default fence is higher than any that a replica has seen when it is added, so the
        publisher that was started last wins (``spec_kit.weight_sync.fence``). Buckets are assembled on
        ``device``. ``close`` closes the transports.
        """
        self.group = group
        self.fence = fence
        self._asks_for_fences = fence is None
        self._random_bits = random_bits()
        self._target = target
        self._transports = transports
        self._device = torch.device("cpu") if device is None else device
        self._choice = TransportChoice(transports, self._device, fastest_first=fastest_first)
        self._members: dict[str, _Member] = {}
        self._newest: Payload | None = None
        self._previous: Payload | None = None
        self._number = 0
        self._last_version = -1
        self._lock = threading.Lock()
        """Guards ``_under_way`` and ``_closed``. Only ``_jobs``'s thread changes the attributes above."""
        self._under_way: list[Delivery] = []
        self._closed = False
        self._link = PublisherLink(address)
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix="weight-publisher")
        self._callbacks = ThreadPoolExecutor(1, thread_name_prefix="weight-publisher-callbacks")

    @property
    def committed(self) -> int | None:
        """The newest committed version; None if there is none."""
        newest = self._newest
        return None if newest is None else newest.manifest.version

    def add(
        self, name: str, replica: DraftReplica, timeout_s: float = _REPAIR_S
    ) -> Future[ReplicaOutcome | None]:
        """Push to a replica from now on, and take it over from its previous publisher.

        The replica first gets the newest committed version. The future's result is the outcome of that push;
        None if no version is committed.
        """
        return self._submit(lambda: self._add(name, replica, timeout_s))

    def remove(self, name: str) -> Future[None]:
        """Stop pushing to a replica."""
        return self._submit(lambda: self._remove(name))

    def publish(
        self,
        version: int | None,
        weights: Mapping[str, Tensor],
        *,
        timeout_s: float = 60.0,
    ) -> Future[PublishReport]:
        """Push exported tensors as ``version``, which must be higher than the last published one.

        If a tensor holds NaN or infinity, nothing is sent, and the report's reasons name the tensor. If a
        replica has committed another draft under ``version``, no replica commits. If ``version`` is None, the
        publisher uses ``next_version``. If another trainer has taken that version, the publisher tries again
        with a higher version, within ``timeout_s``.

        Nothing may change the tensors after this call, except work that is already queued on the current
        stream of their device. ``timeout_s`` limits the push itself, not the wait for earlier pushes. The
        future's result is a report, even if nothing was committed. Its callbacks run one after the other on a
        separate thread, while the next push goes on.
        """
        devices = {tensor.device for tensor in weights.values() if not tensor.is_cpu}
        made = [queued_before(device) for device in devices]

        def publish() -> PublishReport:
            for event in made:
                event.synchronize()
            return self._publish(version, weights, timeout_s)

        return self._submit(publish, then=self._repair)

    def revert(self, timeout_s: float = 60.0) -> Future[Mapping[str, ReplicaOutcome]]:
        """Undo the newest commit on every replica; if a replica cannot, push the previous version to it."""
        return self._submit(lambda: self._revert(timeout_s), then=self._repair)

    def serving(self, timeout_s: float = 10.0) -> dict[str, ServingStatus]:
        """Return each replica's status; a replica that does not answer in time counts as quarantined."""
        deadline = time.monotonic() + timeout_s
        asked = {name: member.replica.status() for name, member in list(self._members.items())}
        return {name: _answer(name, future, deadline) for name, future in asked.items()}

    def next_version(self, timeout_s: float = 10.0) -> int:
        """Return an unused version: one more than the highest that was published or that a replica reports.

        Wait for earlier pushes and for the replicas' answers. Raise EngineError if no higher version is left.
        """
        return self._submit(lambda: self._next_version(timeout_s)).result()

    def close(self) -> None:
        """Cancel the push in progress, and stop; replicas continue to serve their current draft."""
        with self._lock:
            self._closed = True
            for delivery in self._under_way:
                delivery.cancel()
        self._jobs.shutdown(wait=True, cancel_futures=True)
        self._callbacks.shutdown(wait=True)
        self._link.close()
        for transport in self._transports.values():
            transport.close()

    def _submit(self, job: Callable[[], R], then: Callable[[], None] | None = None) -> Future[R]:
        """Run ``job`` after all earlier jobs and return its future. If it succeeds, ``then`` runs next."""
        result: Future[R] = Future()

        def run() -> None:
            try:
                with separate_stream(self._device):
                    value = job()
            except BaseException as error:  # noqa: BLE001 (the top of a thread: the caller gets every error)
                self._callbacks.submit(result.set_exception, error)
                return
            # On a thread of its own, so that a slow callback does not delay the next push.
            self._callbacks.submit(result.set_result, value)
            if then is not None:
                then()

        self._jobs.submit(run).add_done_callback(lambda done: done.cancelled() and result.cancel())
        return result

    def _add(self, name: str, replica: DraftReplica, timeout_s: float) -> ReplicaOutcome | None:
        if name in self._members:
            raise ConfigError(f"replica {name!r} is known already; remove it first")
        self._members[name] = member = _Member(
            replica=replica, fence=self._fence_for(name, replica, timeout_s)
        )
        if self._newest is None:
            return None
        member.counts = False
        return self._push(self._newest, [name], timeout_s).deliveries[name].outcome()

    def _fence_for(self, name: str, replica: DraftReplica, timeout_s: float) -> int:
        """Return the given fence, or a fence higher than any that the replica has seen.

        A replica that does not answer is assumed to have seen no fence.
        """
        if not self._asks_for_fences and self.fence is not None:
            return self.fence
        last = _answer(name, replica.status(), time.monotonic() + timeout_s).update
        return max(self.fence or 0, fence_after(0 if last is None else last.fence, self._random_bits))

    def _level_fences(self) -> int:
        """Return this publisher's fence. The first push sets it, to the highest fence of all replicas.

        So if two publishers push to the same replicas, the same publisher wins at all of them.
        """
        if self.fence is None:
            fences = [member.fence for member in self._members.values()]
            self.fence = max(fences, default=fence_after(0, self._random_bits))
            for member in self._members.values():
                member.fence = self.fence
        return self.fence

    def _remove(self, name: str) -> None:
        self._members.pop(name, None)
        for transport in self._transports.values():
            transport.forget(name)

    def _next_version(self, timeout_s: float) -> int:
        newest = max(self._last_version, newest_version(self.serving(timeout_s).values()))
        if newest >= LARGEST_VERSION:
            raise EngineError(f"a replica has had version {newest}, the largest; start its server anew")
        return 1 + newest

    def _publish(self, version: int | None, weights: Mapping[str, Tensor], timeout_s: float) -> PublishReport:
        if version is not None and version <= self._last_version:
            raise ConfigError(
                f"version {version} is not higher than {self._last_version}, the last that was published"
            )
        started = time.monotonic()
        deadline = started + timeout_s
        finite = FiniteCheck()
        entries = tuple(tensor_entries(finite.watch(weights.items())))
        problem = finite.problem()
        described_s = time.monotonic() - started
        # Weights with NaN go to nobody. Replicas that are behind get the version from ``_repair``.
        counted = [name for name, member in self._members.items() if member.counts and not problem]
        while True:
            self._last_version = (
                self._next_version(deadline - time.monotonic()) if version is None else version
            )
            payload = Payload(manifest=self._manifest(self._last_version, entries), weights=weights)
            push = self._push(payload, counted, deadline - time.monotonic())
            # A trainer with a lower fence took the version; replicas that this push has reached now refuse it.
            if version is not None or not push.version_is_taken or time.monotonic() > deadline:
                break
        committed = push.committed or not (problem or self._members)
        if committed:
            self._previous, self._newest = self._newest, payload
        outcomes = {name: delivery.outcome() for name, delivery in push.deliveries.items()}
        left_out = ReplicaOutcome(state="aborted", reason=problem) if problem else _LEFT_OUT
        return PublishReport(
            version=payload.manifest.version,
            digest=payload.manifest.digest,
            committed=committed,
            num_bytes=payload.manifest.num_bytes,
            replicas={name: outcomes.get(name, left_out) for name in self._members},
            seconds={"manifest": described_s, **push.seconds, "total": time.monotonic() - started},
        )

    def _manifest(self, version: int, entries: tuple[TensorEntry, ...]) -> Manifest:
        return Manifest(
            group=self.group,
            version=version,
            parent=self.committed,
            fence=self._level_fences(),
            target=self._target,
            tensors=entries,
        )

    def _push(self, payload: Payload, names: Iterable[str], timeout_s: float) -> Push:
        """Push to the replicas called ``names``, and store what each replica is now known to serve."""
        self._number += 1
        members = {name: self._members[name] for name in names}
        updates = {
            name: UpdateId(group=self.group, fence=member.fence, number=self._number)
            for name, member in members.items()
        }
        push = Push(
            {
                name: Delivery(name, member.replica, self._link, self._choice, self._device)
                for name, member in members.items()
            }
        )
        with self._known(push):
            push.run(updates, payload, time.monotonic() + timeout_s)
        for name, member in members.items():
            delivery = push.deliveries[name]
            if delivery.state == "committed":
                member.counts = True
                member.update = updates[name]
            # It lacks the version that others serve, or nobody knows what it serves; ``_repair`` will ask.
            elif push.committed or delivery.has_failed:
                member.counts = False
        return push

    @contextlib.contextmanager
    def _known(self, push: Push) -> Generator[None]:
        """Let ``close`` cancel the push from another thread during the block."""
        with self._lock:
            if self._closed:
                raise RunError("the publisher is closed")
            self._under_way = list(push.deliveries.values())
        try:
            yield
        finally:
            with self._lock:
                self._under_way = []

    def _revert(self, timeout_s: float) -> dict[str, ReplicaOutcome]:
        if self._newest is None:
            raise ConfigError("no version is committed, so none can be reverted")
        # Only one earlier version is kept.
        self._newest, self._previous = self._previous, None
        deadline = time.monotonic() + timeout_s
        asked = {
            name: member.replica.revert(member.update)
            for name, member in self._members.items()
            if member.update is not None
        }
        outcomes: dict[str, ReplicaOutcome] = {}
        for name, member in self._members.items():
            status = _answer(name, asked[name], deadline) if name in asked else ServingStatus()
            member.update = None
            member.counts = status.state == "reverted" and self._serves_newest(status)
            outcomes[name] = ReplicaOutcome(
                state="reverted" if member.counts else "quarantined", reason=status.reason
            )
        return outcomes

    def _serves_newest(self, status: ServingStatus) -> bool:
        """Return whether a replica serves the newest committed version.

        If no version is committed, return True: the replica may serve any draft.
        """
        if self._newest is None:
            return True
        return status.state in _SETTLED and status.digest == self._newest.manifest.digest

    def _repair(self) -> None:
        """Push the newest committed version to each replica that does not serve it, one after the other."""
        for name, member in list(self._members.items()):
            if member.counts:
                continue
            with contextlib.suppress(Exception):  # the replica has gone, or this publisher is closed
                status = settled(member.replica.status(), time.monotonic() + _STATUS_S, name)
                member.counts = self._serves_newest(status)
                if self._newest is not None and not member.counts:
                    self._push(self._newest, [name], _REPAIR_S)


def _answer(name: str, future: Future[ServingStatus], deadline: float) -> ServingStatus:
    """Return a replica's status; a replica whose call fails counts as quarantined."""
    try:
        return settled(future, deadline, f"replica {name!r}")
    except Exception as error:  # noqa: BLE001 (a replica may raise anything)
        return ServingStatus(state="quarantined", reason=cause(error))
