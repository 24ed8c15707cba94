"""FollowRun repeats a cycle: take live requests, train on them, judge the draft, push a better one.

The training of each cycle starts from a checkpoint and ends with a checkpoint. Requests are held in memory, and in a
file only if ``follow.retention`` is on.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spec_core.errors import RunError, TargetError, UsageError
from spec_core.foreign import cause
from spec_kit.targets.target_reader import read_target
from spec_trainer.base.disk import new_folder, remove
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.data.batching import EpochBatches
from spec_trainer.live.cycles import first_weights
from spec_trainer.live.figures import Progress, run_metrics
from spec_trainer.live.judge import Gain, simulate
from spec_trainer.live.labels import lengths_by_label
from spec_trainer.live.latency_budget import LatencyBudget
from spec_trainer.live.reservoir import Reservoir
from spec_trainer.live.traffic import Traffic
from spec_trainer.live.verdicts import ServedVersion, first_target, last_served
from spec_trainer.push.publish import publish_draft
from spec_trainer.push.request import PushRequest
from spec_trainer.push.servers import ANSWER_S
from spec_trainer.report.page import write_report
from spec_trainer.run.draft_trainer import export_draft
from spec_trainer.run.metrics import StepLines, read_metrics
from spec_trainer.run.records import length_of_served
from spec_trainer.training.checkpoint.store import read_weights
from spec_trainer.workers.decoded_folder import DecodedFolder
from spec_trainer.workers.run_driver import RankTask

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from spec_core import TargetSpec
    from spec_trainer.base.stop_request import StopRequest
    from spec_trainer.live.metrics_page import MetricsPage
    from spec_trainer.live.own_server import OwnServer
    from spec_trainer.live.retention import RetainedRequests
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.workers.run_driver import RunDriver

log = logging.getLogger(__name__)

_TRAIN = "spec_trainer.live.rank_tasks:train_on_finite"
_LEAST_HELD_OUT = 8
"""Smallest number of held-out requests by which a draft is judged."""
_AGAIN_S = 60.0
"""Seconds until the next push to a server that serves an earlier draft."""
_LONGEST_PAUSE = 16
"""Largest number of cycles from one verdict to the next, if drafts do not improve."""


class FollowRun:
    """Runs the cycles of ``spec-trainer follow``, and holds their state."""

    def __init__(
        self,
        spec: RunSpec,
        open_driver: Callable[[RunSpec, Reservoir], AbstractContextManager[RunDriver]],
        stop: StopRequest,
        done_steps: int,
        page: MetricsPage | None = None,
        retained: RetainedRequests | None = None,
        server: OwnServer | None = None,
    ) -> None:
        """Continue after ``done_steps`` steps, with the draft that was pushed last; show figures on ``page``.

        ``server`` is the server that the command starts itself.
        ``open_driver`` returns a driver that has an engine with the target, or that takes the reservoir's features.
        """
        self._spec, self._open_driver, self._stop, self._done_steps = spec, open_driver, stop, done_steps
        self._page, self._retained, self._server = page, retained, server
        self._config = spec.config.follow
        target = spec.target
        longest = min(spec.config.data.max_length, target.max_positions)
        sizes = {"longest": longest, "vocab_size": target.vocab_size}
        self._reservoir = Reservoir(
            self._config, **sizes, seed=spec.config.seed, image_token_id=target.image_token_id
        )
        if retained is not None:
            self._reservoir.restore(retained.read(**sizes))
        schema = spec.schema if self._config.capture == "serving" else None
        self._traffic = Traffic(self._config.servers, ANSWER_S, schema)
        budget_ms = self._config.latency_budget_ms
        self._budget = (
            None if budget_ms is None else LatencyBudget(self._config.servers, budget_ms, self._config.poll_s)
        )
        self._folder = DecodedFolder(spec.directory)
        self._served = last_served(spec)
        self._first_target = first_target(spec)
        self._acceptance_lengths: dict[str, float] = {}
        """Acceptance length of the drafts in the last verdict: trained, start, and the one served since then."""
        self._by_label: dict[str, float] = {}
        """Acceptance length in the last verdict of the draft served since then, by the requests' label."""
        self._num_verdicts = self._num_pushes = 0
        self._again_s = time.monotonic()
        """Time (``time.monotonic``) from which a server with an earlier draft may be pushed to again."""
        self._pause = self._left = 1
        """``_pause``: cycles from one verdict to the next. ``_left``: cycles until the next verdict."""

    def run(self) -> None:
        """Repeat cycles until ``follow.requests`` requests have arrived. Raise Interrupted if stopped before."""
        self._prepare()
        try:
            is_complete = False
            while not is_complete:
                with self._open_driver(self._spec, self._reservoir) as self._driver:
                    is_complete = self._follow()
        except Interrupted:
            self._finish()
            raise
        self._finish()

    def _follow(self) -> bool:
        """Repeat cycles. Return True if enough requests have arrived, False if the target has changed."""
        self._retain()
        while True:
            if self._reservoir.num_fresh >= (1 if self._is_complete() else self._config.every):
                if self._has_new_target():
                    return False
                if self._budget is not None:
                    self._budget.wait(lambda: self._stop.requested, self._driver.wait)
                self._train()
                self._retain()
                self._left -= 1
                if self._left <= 0 or self._is_complete():
                    self._judge()
            if self._is_complete():
                return True
            self._take()

    def _has_new_target(self) -> bool:
        """If the target has changed, use it and return True. Raise RunError if settings or shape forbid it."""
        before, target = self._spec.target, self._settled_target()
        if target.digest == before.digest:
            return False
        if self._config.new_target == "stop":
            raise RunError(
                f"target {target.folder} has changed, and the run is for the former one; begin another output with "
                f"draft.init_from={self._folder.draft(self._served.step)}, there with follow.new_target=learn if it "
                "changes again"
            )
        self._spec.draft.check_target(target)
        if (self._spec.draft.required_features(target), target.vocab_size) != (
            self._spec.schema,
            before.vocab_size,
        ):
            raise RunError(f"target {target.folder} has changed its shape; start anew with another output")
        log.info("the target has changed; the draft learns from its new weights")
        self._spec = replace(self._spec, target=target)
        return True

    def _settled_target(self) -> TargetSpec:
        """Read the target from its files; if they are being replaced, wait until they no longer change."""
        known, last = self._spec.target.digest, None
        while True:
            try:
                found = read_target(self._spec.target.folder)
                if found.digest in (known, last):
                    return found
                last = found.digest
            except TargetError as error:
                log.info("the target's files are being written: %s", error)
            self._wait()

    def _is_complete(self) -> bool:
        return self._config.requests is not None and self._reservoir.num_new >= self._config.requests

    def _prepare(self) -> None:
        """Export the start draft if its folder does not exist, and remove drafts that were not pushed."""
        start = self._folder.draft(0)
        if not start.exists():
            self._export(first_weights(self._spec), start)
            if self._spec.config.draft.init_from is None and self._server is None:
                log.info("the start draft, which servers are to begin with, is %s", start)
        self._folder.keep_only(0, self._served.step)
        self._keep_server()

    def _keep_server(self) -> None:
        if self._server is not None:
            self._server.keep(self._folder.draft(self._served.step))

    def _export(self, weights: dict[str, Any], folder: Path) -> None:
        spec = self._spec
        export_draft(spec.draft, weights, spec.target, folder, spec.config.data)

    def _take(self) -> None:
        """Fetch the requests that the servers have stored; if a cycle needs more, wait ``follow.poll_s``."""
        self._check_stop()
        self._keep_server()
        for taken in self._traffic.take(lambda: self._stop.requested):
            self._reservoir.add(*taken)
        self._retain()
        self._show()
        if self._lags_behind() and time.monotonic() >= self._again_s:
            log.info("a server has come back with an earlier draft")
            self._again_s = time.monotonic() + _AGAIN_S
            self._push(self._served.step)
        if self._reservoir.num_fresh < self._config.every and not self._is_complete():
            self._wait()

    def _wait(self) -> None:
        """Wait ``follow.poll_s``. Raise Interrupted if the command is stopped."""
        deadline = time.monotonic() + self._config.poll_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._check_stop()
            self._driver.wait(min(0.1, left_s))

    def _check_stop(self) -> None:
        if self._stop.requested:
            raise Interrupted("interrupted; the same command goes on with the requests that come then")

    def _retain(self) -> None:
        if self._retained is not None:
            self._retained.write(self._reservoir.kept)

    def _lags_behind(self) -> bool:
        """Return whether a server serves an earlier draft version than the version that was pushed last."""
        newest, versions = self._served.version, self._traffic.versions.values()
        return newest is not None and any(version is None or version < newest for version in versions)

    def _train(self) -> None:
        """Train one pass over the samples that the reservoir draws."""
        first = self._done_steps
        samples = self._reservoir.draw(self._spec.source.train, first)
        settings = self._spec.schedule.settings
        batches = EpochBatches(
            samples.train, settings.global_batch_tokens, seed=settings.seed, shuffle=settings.shuffle
        )
        steps = batches.steps_in_epoch(0)
        part = self._spec.cycle(samples, range(first, first + steps))
        notes: dict[str, Any] = {
            "serving_version": self._served.version or self._traffic.newest_version,
            "requests": self._reservoir.num_seen,
        }
        if self._acceptance_lengths:
            notes["serving_acceptance_length"] = self._acceptance_lengths["served"]
        part = part.resuming(f"step-{first}" if first else "latest")
        pause = None if self._budget is None else self._budget.wait
        result = self._driver.perform(RankTask(entry=_TRAIN), part, notes, pause)
        self._reservoir.leave_out(samples, result["not_finite"])
        self._done_steps = first + steps

    def _judge(self) -> None:
        """Compare the current draft with the served and the start draft; push a significantly better draft."""
        held_out, labels = self._reservoir.held_out(), self._reservoir.held_out_labels()
        now, served = self._done_steps, self._served.step
        if len(held_out.train) < _LEAST_HELD_OUT:
            log.info("too few held-out requests to judge by: %d of %d", len(held_out.train), _LEAST_HELD_OUT)
            return
        checkpoint = self._spec.directory.checkpoints / f"step-{now}"
        self._export(read_weights(self._spec.strategy_type, checkpoint), self._folder.draft(now))
        folders = {step: self._folder.draft(step) for step in (now, served, 0)}
        not_finite: set[int] = set()
        worth = simulate(self._spec, self._driver, held_out, folders, not_finite)
        self._reservoir.leave_out(held_out, not_finite)
        if len(worth[now].tokens) < _LEAST_HELD_OUT:
            log.info("too few held-out requests with finite features to judge by: %d", len(worth[now].tokens))
            return
        gain = Gain.of(worth[now], worth[served])
        pushed = False
        if gain.is_sure and not Gain.of(worth[0], worth[now]).is_sure:
            pushed = self._push(now)
        elif Gain.of(worth[0], worth[served]).is_sure:
            pushed = self._push(0)
        self._pause = 1 if pushed else min(2 * self._pause, _LONGEST_PAUSE)
        self._left = self._pause
        self._num_verdicts += 1
        lengths = {
            "acceptance_length": worth[now],
            "acceptance_length_served": worth[served],
            "acceptance_length_start": worth[0],
        }
        labels = lengths_by_label(lengths, [label for at, label in enumerate(labels) if at not in not_finite])
        row = {
            "step": now,
            "time": time.time(),
            "parent": served,
            "oldest_request": self._reservoir.oldest,
            "requests": self._reservoir.num_seen,
            "held_out": len(worth[now].tokens),
            **{name: one.acceptance_length for name, one in lengths.items()},
            "saved": gain.saved,
            "chance": gain.chance,
            "served": self._served.step,
            "version": self._served.version,
            "target": self._spec.target.digest,
            "labels": labels,
        }
        now_served = length_of_served(row)
        drafts = {"trained": "acceptance_length", "served": now_served, "start": "acceptance_length_start"}
        self._acceptance_lengths = {draft: row[name] for draft, name in drafts.items()}
        self._by_label = {label: one[now_served] for label, one in labels.items()}
        self._note(row)
        self._folder.keep_only(0, self._served.step)
        self._show()

    def _note(self, row: dict[str, Any]) -> None:
        """Write a verdict to ``versions.jsonl``, and log it."""
        with StepLines(self._spec.directory.versions) as lines:
            lines.write(row)
        log.info(
            "after %d steps and %d requests the draft has tau %.2f on %d held-out ones, the served one %.2f, the "
            "start draft %.2f; it saves %.1f %% of the verifications, by chance up to %.1f %%; servers have that of "
            "step %d",
            row["step"], row["requests"], row["acceptance_length"], row["held_out"],
            row["acceptance_length_served"], row["acceptance_length_start"],
            100 * row["saved"], 100 * row["chance"], row["served"],
        )  # fmt: skip

    def _push(self, step: int) -> bool:
        """Push the draft of step ``step`` to every server that answers; return whether any committed it."""
        servers, push = list(self._traffic.versions), self._spec.config.push
        if not servers:
            return False
        request = PushRequest(
            draft_model=self._folder.draft(step),
            target=str(self._spec.target.folder),
            to=servers,
            transport=list(push.transport) or None,
            bucket_bytes=push.bucket_bytes,
            folder=push.folder,
            options=push.options,
            backend=self._spec.config.backend.name,
            address=push.address,
            timeout_s=push.timeout_s,
        )
        try:
            report = publish_draft(request, self._spec.target)
            if not report.committed and self._first_target.digest != self._spec.target.digest:
                # Servers whose weights were replaced in place still name the target that they were started with.
                report = publish_draft(request, self._first_target)
        except (RunError, UsageError) as error:
            log.warning("the draft of step %d was not pushed: %s", step, cause(error))
            return False
        for url, outcome in report.replicas.items():
            if outcome.state != "committed":
                log.warning("%s did not take the draft of step %d: %s", url, step, outcome.reason)
        if not report.committed:
            return False
        log.info("servers have the draft of step %d as version %d", step, report.version)
        self._served = ServedVersion(step, report.version)
        self._num_pushes += 1
        return True

    def _show(self) -> None:
        """Update the figures on the page that Prometheus reads."""
        if self._page is None:
            return
        progress = Progress(
            steps=self._done_steps,
            verdicts=self._num_verdicts,
            pushes=self._num_pushes,
            waited_s=0.0 if self._budget is None else self._budget.waited_s,
            served_step=self._served.step,
            acceptance_lengths=self._acceptance_lengths,
            by_label=self._by_label,
        )
        self._page.show(run_metrics(self._config.servers, self._traffic, self._reservoir, progress))

    def _finish(self) -> None:
        """Write a copy of the served draft, a summary and a report into the run directory."""
        directory, spec = self._spec.directory, self._spec
        trained = read_metrics(directory.metrics)
        scratch = new_folder(directory.root, ".draft-")
        shutil.copytree(self._folder.draft(self._served.step), scratch, dirs_exist_ok=True)
        if os.path.lexists(directory.draft):
            remove(directory.draft)
        scratch.rename(directory.draft)
        summary = {
            "description": f"{spec.config.draft.name} draft for {spec.target.folder.name} on live traffic",
            "steps": trained[-1]["step"] if trained else 0,  # a cycle may have been interrupted
            "draft": str(directory.draft),
            "served_step": self._served.step,
            "served_version": self._served.version,
            "requests": self._reservoir.num_seen,
            "left_out": dict(self._traffic.left_out + self._reservoir.left_out),
        }
        directory.write_summary(summary)
        write_report(directory, f"Training of {summary['description']}", summary)
