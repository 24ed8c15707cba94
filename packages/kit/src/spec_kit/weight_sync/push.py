"""Push sends one update to several replicas, each of which commits it independently."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from spec_core import UpdateId
    from spec_kit.weight_sync.delivery import Delivery, Payload


_COMMIT_SHARE = 0.25
"""Fraction of a push's time that is reserved for commits.

So a replica that hangs in the transfer cannot prevent the other replicas from committing.
"""


class Push:
    """Takes all deliveries through the two phases, transfer and commit, in parallel."""

    def __init__(self, deliveries: Mapping[str, Delivery]) -> None:
        """Prepare a push. ``deliveries``: name of a replica -> its delivery."""
        self.deliveries = deliveries
        self.seconds: dict[str, float] = {}

    @property
    def committed(self) -> bool:
        """Return whether at least one replica has committed the update."""
        return any(delivery.state == "committed" for delivery in self.deliveries.values())

    @property
    def version_is_taken(self) -> bool:
        """Return whether a replica has committed another draft under this version; then no replica commits."""
        return any(delivery.version_is_taken for delivery in self.deliveries.values())

    def run(self, updates: Mapping[str, UpdateId], payload: Payload, deadline: float) -> None:
        """Push to all replicas; afterwards every delivery has its outcome.

        ``updates``: name of a replica -> id of its update.
        """
        reserved_s = _COMMIT_SHARE * (deadline - time.monotonic()) if len(self.deliveries) > 1 else 0.0
        with ExitStack() as stack:
            for name, delivery in self.deliveries.items():
                stack.enter_context(delivery.begin(updates[name], payload, deadline - reserved_s, deadline))
            self._each("transfer", self.deliveries.values(), lambda delivery: delivery.transfer())
            received = [delivery for delivery in self.deliveries.values() if delivery.state == "received"]
            failed = [delivery for delivery in self.deliveries.values() if delivery.state == "aborted"]
            if self.version_is_taken:
                reason = "; ".join(
                    delivery.reason for delivery in self.deliveries.values() if delivery.reason
                )
                self._each("abort", received, lambda delivery: delivery.abort(reason))
            else:
                self._each("commit", received, lambda delivery: delivery.commit())
            # Aborts follow the commits, because a replica that hangs may answer late.
            self._each("abort", failed, lambda delivery: delivery.abort(delivery.reason))

    def _each(self, phase: str, deliveries: Iterable[Delivery], action: Callable[[Delivery], None]) -> None:
        """Run ``action`` for each delivery, in parallel, and wait for all; actions do not raise."""
        if chosen := list(deliveries):
            started = time.monotonic()
            with ThreadPoolExecutor(len(chosen), thread_name_prefix=f"weight-{phase}") as pool:
                list(pool.map(action, chosen))
            self.seconds[phase] = time.monotonic() - started
