"""Push: one update at several replicas, in two phases."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from spec_core.draft_replica import UpdateId
    from spec_kit.weight_sync.delivery import Delivery, Payload

Policy = Literal["all", "quorum", "best_effort"]


def is_enough(policy: Policy, num_done: int, num_replicas: int) -> bool:
    """Return whether an update goes on when ``num_done`` of the replicas have come so far."""
    least = {"all": num_replicas, "quorum": num_replicas // 2 + 1, "best_effort": 1}[policy]
    return num_done >= min(least, num_replicas)


class Push:
    """Takes its deliveries through the two phases, all replicas at the same time."""

    def __init__(self, deliveries: Mapping[str, Delivery], policy: Policy) -> None:
        """Commit when enough of the replicas have received the update, by the policy."""
        self.deliveries = deliveries
        self.committed = False
        self.version_is_taken = False
        """Whether a replica has another draft under the version: then it is committed nowhere, by any policy."""
        self.seconds: dict[str, float] = {}
        self._policy: Policy = policy

    def run(self, updates: Mapping[str, UpdateId], payload: Payload, deadline: float) -> None:
        """Push; afterwards every delivery has its outcome, and ``committed`` says how it ended.

        ``updates`` has the update of each delivery, by its name.
        """
        with ExitStack() as stack:
            for name, delivery in self.deliveries.items():
                stack.enter_context(delivery.begin(updates[name], payload, deadline))
            self._each("transfer", self.deliveries.values(), lambda delivery: delivery.transfer())
            received = [delivery for delivery in self.deliveries.values() if delivery.state == "received"]
            self.version_is_taken = any(delivery.version_is_taken for delivery in self.deliveries.values())
            if self.version_is_taken or not self._is_enough("received"):
                reason = f"too few replicas have received it: {self._reasons()}"
                self._each("abort", received, lambda delivery: delivery.abort(reason))
                return
            self._each("commit", received, lambda delivery: delivery.commit())
            self.committed = self._is_enough("committed")
            if not self.committed:
                reason = f"too few replicas have committed it: {self._reasons()}"
                # One whose commit failed may have committed all the same: its answer was lost, or its copy differs.
                self._each("revert", received, lambda delivery: delivery.revert(reason))

    def _is_enough(self, state: str) -> bool:
        done = sum(delivery.state == state for delivery in self.deliveries.values())
        return is_enough(self._policy, done, len(self.deliveries))

    def _reasons(self) -> str:
        return "; ".join(delivery.reason for delivery in self.deliveries.values() if delivery.reason)

    def _each(self, phase: str, deliveries: Iterable[Delivery], action: Callable[[Delivery], None]) -> None:
        """Run an action for each delivery, all at once, and wait for all; actions do not raise."""
        if chosen := list(deliveries):
            started = time.monotonic()
            with ThreadPoolExecutor(len(chosen), thread_name_prefix=f"weight-{phase}") as pool:
                list(pool.map(action, chosen))
            self.seconds[phase] = time.monotonic() - started
