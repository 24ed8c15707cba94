"""LivePushes pushes the current draft to running servers at regular steps of training."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from spec_core.errors import RunError
from spec_core.foreign import cause
from spec_core.resource import Resource
from spec_core.wording import counted
from spec_kit.weight_sync import separate_stream
from spec_trainer.push.canary import Canary
from spec_trainer.push.servers import connect_servers, open_publisher
from spec_trainer.push.snapshot import WeightSnapshot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from spec_kit.weight_sync import PublishReport, ReplicaOutcome
    from spec_trainer.run.draft_trainer import DraftTrainer
    from spec_trainer.run.spec import RunSpec

log = logging.getLogger(__name__)

_LEAVING_S = 5.0
"""Seconds for servers to answer if a run ends during a push; then the connections are closed."""


class LivePushes(Resource):
    """Decides after which steps the draft is pushed; a thread of rank 0 pushes copies of the weights."""

    def __init__(self, spec: RunSpec, rank: int, device: torch.device, group: ProcessGroup) -> None:
        """Connect rank 0 of ``group`` to the servers of ``push.to``; without ``train.push_every`` do nothing."""
        self._device = device
        self._group = group
        self._every = spec.config.train.push_every if spec.config.push.to else 0
        self._last_step = spec.schedule.total_steps
        self._pusher = _Pusher(spec, device) if self._every and rank == 0 else None

    def is_due(self, done_steps: int) -> bool:
        """Return whether to push after ``done_steps`` steps; the same on every rank."""
        return bool(self._every) and (done_steps % self._every == 0 or done_steps == self._last_step)

    def begin(self, done_steps: int, trainer: DraftTrainer) -> None:
        """Push the draft's current weights as version ``done_steps``. Collective: weights are gathered.

        If the previous push has not finished, this push is skipped, unless it is the last push of the run. On
        a device, the weights are copied asynchronously, in stream order before the next step; the CPU does
        not wait.
        """
        if not self._goes_ahead(done_steps):
            if self._pusher is not None:
                log.info("no push after step %d: the one before is not over", done_steps)
            return
        if self._pusher is not None:
            self._pusher.begin(done_steps, trainer)
        else:
            deque(trainer.gather_weights(), maxlen=0)

    def new_fields(self) -> dict[str, Any]:
        """Return the served version and the results of finished pushes, for a step's row of metrics."""
        return {} if self._pusher is None else {**self._pusher.outcome(), **self._pusher.serving()}

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the last push, at most twice ``push.timeout_s``; return results not yet in metrics."""
        if self._pusher is None:
            return []
        self._pusher.wait()
        return list(iter(self._pusher.outcome, {}))

    def close(self) -> None:
        """Cancel a push in progress; servers continue to serve their current draft."""
        if self._pusher is not None:
            self._pusher.close()

    def _goes_ahead(self, done_steps: int) -> bool:
        """Return, equally on every rank, whether to push now.

        Rank 0 decides, because it knows whether the previous push has ended.
        """
        if done_steps == self._last_step:
            return True
        is_free = self._pusher is not None and not self._pusher.is_busy
        if self._group.size() == 1:
            return is_free
        import torch
        import torch.distributed as dist

        answer = torch.tensor(is_free, dtype=torch.int32, device=self._device)
        dist.broadcast(answer, 0, group=self._group)
        return bool(answer)


class _Pusher(Resource):
    """Pushes draft versions in a thread; reverts worse versions if ``push.canary_margin`` is set."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        config = spec.config.push
        self._config = config
        self._target = spec.target
        self._device = device
        self._snapshot = WeightSnapshot()
        self._servers = connect_servers(config.to)
        self._canary = (
            None
            if config.canary_margin is None
            else Canary(self._servers, config.canary_margin, config.canary_rounds)
        )
        self._publisher = open_publisher(spec.backend, config, spec.target, device)
        self._taken: dict[str, str] = {}
        """Transport by which each server last got a version."""
        for url, server in self._servers.items():
            self._publisher.add(url, server)
        self._lead: int | None = None
        """Number that is added to a step to get its version number; None before the first push."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="live-pushes")
        self._newest: Future[None] | None = None
        self._outcomes: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    @property
    def is_busy(self) -> bool:
        return self._newest is not None and not self._newest.done()

    def begin(self, version: int, trainer: DraftTrainer) -> None:
        # The push under way may not have read its copies yet.
        snapshot = WeightSnapshot() if self.is_busy else self._snapshot
        try:
            snapshot.take(trainer.gather_weights())
        except RunError as error:
            log.warning("no push of version %d: %s", version, error)
            return
        self._newest = self._thread.submit(self._push, version, trainer, snapshot)

    def outcome(self) -> dict[str, Any]:
        return {} if self._outcomes.empty() else self._outcomes.get()

    def serving(self) -> dict[str, Any]:
        version = self._publisher.committed
        return {} if version is None else {"serving_version": version}

    def wait(self) -> None:
        if self._newest is not None and not self._newest.done():
            log.info("waiting for the last push, at most %g s", 2 * self._config.timeout_s)
            wait([self._newest], self._config.timeout_s)
            self._end_canary()  # a version that had no traffic yet is not judged
            wait([self._newest], self._config.timeout_s)

    def close(self) -> None:
        self._end_canary()
        cut = threading.Timer(_LEAVING_S, self._disconnect)
        cut.daemon = True
        cut.start()
        self._publisher.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        cut.cancel()
        self._disconnect()

    def _end_canary(self) -> None:
        if self._canary is not None:
            self._canary.end()

    def _disconnect(self) -> None:
        for server in self._servers.values():
            server.close()

    def _version_of(self, done_steps: int) -> int:
        """Return the version number of the draft after ``done_steps`` steps.

        It is ``done_steps`` plus an offset, so that it exceeds all versions that the servers had before the
        run.
        """
        if self._lead is None:
            self._lead = max(0, self._publisher.next_version(self._config.timeout_s) - done_steps)
            if self._lead:
                log.info("versions of this run are its steps plus %d: servers had earlier ones", self._lead)
        return done_steps + self._lead

    def _push(self, done_steps: int, trainer: DraftTrainer, snapshot: WeightSnapshot) -> None:
        version = done_steps
        try:
            version = self._version_of(done_steps)
            with separate_stream(self._device):
                weights = trainer.exported(snapshot.read(), self._target)
                if self._canary is not None:
                    self._canary.look(self._alike())
                report = self._publish(version, weights)
            if report.committed and self._canary is not None:
                self._judge(self._canary, report)
        except Exception as error:  # noqa: BLE001 (the top of a thread; no failure of a push ends a run)
            log.warning("push of version %d failed: %s", version, cause(error))

    def _alike(self) -> list[str]:
        """Return the servers that serve the version that was committed last.

        Before the first commit, return all servers if they serve the same version and digest, otherwise none.
        """
        serving = {url: (status.version, status.digest) for url, status in self._publisher.serving().items()}
        committed = self._publisher.committed
        alike = {found for found in serving.values() if committed in (None, found[0])}
        return [url for url, found in serving.items() if alike == {found}]

    def _publish(self, version: int, weights: dict[str, Tensor]) -> PublishReport:
        report = self._publisher.publish(version, weights, timeout_s=self._config.timeout_s).result()
        self._outcomes.put(
            {
                "push_version": version,
                "push_committed": report.committed,
                "push_bytes": report.num_bytes,
                "push_s": report.seconds["total"],
                **{f"push_{part}_s": value for part, value in report.seconds.items() if part != "total"},
            }
        )
        self._name_transports(report)
        if failures := _failures(report.replicas, "committed"):
            result = "committed" if report.committed else "not committed"
            log.warning("version %d was %s; %s", version, result, failures)
        return report

    def _name_transports(self, report: PublishReport) -> None:
        """Log which transport a server uses from now on, and why other transports were not used."""
        for url, outcome in report.replicas.items():
            if outcome.transport and outcome.transport != self._taken.get(url):
                self._taken[url] = outcome.transport
                others = "; ".join(f"not {name}: {reason}" for name, reason in outcome.not_taken.items())
                log.info("%s gets the draft by %s; %s", url, outcome.transport, others or "no other is open")

    def _judge(self, canary: Canary, report: PublishReport) -> None:
        """Revert a version whose acceptance length on live traffic has fallen by more than the margin."""
        served = [url for url, outcome in report.replicas.items() if outcome.state == "committed"]
        verdict = canary.judge(served)
        if verdict is None:
            log.info("version %d is not judged: there was too little traffic", report.version)
            return
        before = verdict.before.acceptance_length
        after = verdict.after.acceptance_length
        rounds = counted(verdict.after.rounds, "round")
        found = f"acceptance length {after:.2f} over {rounds}, {before:.2f} before; " + (
            f"chance alone moves their difference by up to {verdict.chance:.2f}"
            if math.isfinite(verdict.chance)
            else f"too few answers were counted to compare: {verdict.after.answers}, "
            f"{verdict.before.answers} before"
        )
        if not verdict.has_fallen:
            log.info("version %d stays: %s", report.version, found)
        else:
            log.warning("version %d is reverted: %s", report.version, found)
            outcomes = self._publisher.revert(self._config.timeout_s).result()
            if failures := _failures(outcomes, "reverted"):
                log.warning("version %d may still be served: %s", report.version, failures)
        self._outcomes.put(
            {
                "push_version": report.version,
                "push_committed": not verdict.has_fallen,
                "push_reverted": verdict.has_fallen,
                "push_acceptance_before": before,
                "push_acceptance_after": after,
            }
        )


def _failures(outcomes: Mapping[str, ReplicaOutcome], expected: str) -> str:
    """Return one line that names each server which is not in the state ``expected``, and the reason."""
    return "; ".join(
        f"{url} {outcome.state}: {outcome.reason}"
        for url, outcome in outcomes.items()
        if outcome.state != expected
    )
