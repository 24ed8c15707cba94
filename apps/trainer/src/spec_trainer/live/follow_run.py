"""FollowRun repeats a cycle: take live requests, train on them, judge the draft, push a better one.

The training of each cycle starts from a checkpoint and ends with a checkpoint. Requests are held in memory, and in a
file only if ``follow.retention`` is on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from spec_core import TargetSpec
from spec_core.errors import RunError, TargetError
from spec_kit.targets.target_reader import read_target
from spec_trainer.base.stop_request import Interrupted, StopRequest
from spec_trainer.data.batching import EpochBatches
from spec_trainer.live.figures import Progress, run_metrics
from spec_trainer.live.judge import VerdictInterval, has_enough_held_out, judge_drafts
from spec_trainer.live.latency_budget import LatencyBudget
from spec_trainer.live.metrics_page import MetricsPage
from spec_trainer.live.own_server import OwnServer
from spec_trainer.live.reservoir import Reservoir
from spec_trainer.live.retention import RetainedRequests
from spec_trainer.live.served_drafts import ServedDrafts
from spec_trainer.live.traffic import Traffic
from spec_trainer.live.verdicts import note_verdict
from spec_trainer.push.servers import ANSWER_S
from spec_trainer.report.page import write_report
from spec_trainer.run.metrics import read_metrics
from spec_trainer.run.model_card import write_run_card
from spec_trainer.run.records import length_of_served
from spec_trainer.run.spec import RunSpec
from spec_trainer.workers.run_driver import RankTask, RunDriver

log = logging.getLogger(__name__)

_TRAIN = "spec_trainer.live.rank_tasks:train_on_finite"


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
        self._spec = spec
        self._open_driver = open_driver
        self._stop = stop
        self._done_steps = done_steps
        self._page = page
        self._retained = retained
        self._server = server
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
        self._drafts = ServedDrafts(spec)
        self._acceptance_lengths: dict[str, float] = {}
        """Acceptance length of the drafts in the last verdict: trained, start, and the one served since then."""
        self._by_label: dict[str, float] = {}
        """Acceptance length in the last verdict of the draft served since then, by the requests' label."""
        self._interval = VerdictInterval()
        self._num_verdicts = 0

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
            # The last cycle trains on what is left, however little.
            if self._reservoir.num_fresh >= (1 if self._is_complete() else self._config.every):
                # Before the pass, so that all its states are of one target.
                if self._has_new_target():
                    return False
                if self._budget is not None:
                    self._budget.wait(lambda: self._stop.requested, self._driver.wait)
                self._train()
                self._retain()
                # The run must not end with a draft that was not judged.
                if self._interval.ends_after_cycle() or self._is_complete():
                    self._judge()
            if self._is_complete():
                return True
            self._take()

    def _has_new_target(self) -> bool:
        """If the target has changed, use it and return True. Raise RunError if settings or shape forbid it."""
        before = self._spec.target
        target = self._settled_target()
        if target.digest == before.digest:
            return False
        if self._config.new_target == "stop":
            raise RunError(
                f"target {target.folder} has changed, and the run is for the former one; begin another output with "
                f"draft.init_from={self._drafts.current}, there with follow.new_target=learn if it "
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
        known = self._spec.target.digest
        last = None
        while True:
            try:
                found = read_target(self._spec.target.folder)
                # Twice the same, so nobody is writing it.
                if found.digest in (known, last):
                    return found
                last = found.digest
            except TargetError as error:
                log.info("the target's files are being written: %s", error)
            self._wait()

    def _is_complete(self) -> bool:
        return self._config.requests is not None and self._reservoir.num_new >= self._config.requests

    def _prepare(self) -> None:
        """Export the start draft if there is none yet, remove drafts that were not pushed, and start the server."""
        new_start = self._drafts.prepare(self._spec)
        if new_start and self._spec.config.draft.init_from is None and self._server is None:
            log.info("the start draft, which servers are to begin with, is %s", new_start)
        self._keep_server()

    def _keep_server(self) -> None:
        if self._server is not None:
            self._server.keep(self._drafts.current)

    def _take(self) -> None:
        """Fetch the requests that the servers have stored; if a cycle needs more, wait ``follow.poll_s``."""
        self._check_stop()
        self._keep_server()
        for taken in self._traffic.take(lambda: self._stop.requested):
            self._reservoir.add(*taken)
        self._retain()
        self._show()
        self._drafts.push_to_returned(self._spec, self._traffic.versions)
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
            "serving_version": self._drafts.served.version or self._traffic.newest_version,
            "requests": self._reservoir.num_seen,
        }
        if self._acceptance_lengths:
            notes["serving_acceptance_length"] = self._acceptance_lengths["served"]
        pause = None if self._budget is None else self._budget.wait
        result = self._driver.perform(RankTask(entry=_TRAIN), part.starting_at(first), notes, pause)
        self._reservoir.leave_out(samples, result["not_finite"])
        self._done_steps = first + steps

    def _judge(self) -> None:
        """Compare the current draft with the served and the start draft; push a significantly better draft."""
        if not has_enough_held_out(self._reservoir):
            return
        now = self._done_steps
        parent = self._drafts.served.step
        folders = self._drafts.export(self._spec, now)
        verdict = judge_drafts(self._spec, self._driver, self._reservoir, folders, (now, parent))
        if verdict is None:
            return
        better = verdict.better_draft(now)
        # ``better`` may be 0: the start draft returns. Servers may refuse what they are sent.
        pushed = better is not None and self._drafts.push(self._spec, better, list(self._traffic.versions))
        self._interval.restart(has_improved=pushed)
        self._num_verdicts += 1
        row = {
            "step": now,
            "time": time.time(),
            "parent": parent,
            "oldest_request": self._reservoir.oldest,
            "requests": self._reservoir.num_seen,
            "held_out": len(verdict.trained.tokens),
            **verdict.lengths,
            "saved": verdict.gain.saved,
            "chance": verdict.gain.chance,
            "served": self._drafts.served.step,
            "version": self._drafts.served.version,
            "target": self._spec.target.digest,
            "labels": verdict.labels,
        }
        note_verdict(self._spec, row)
        now_served = length_of_served(row)
        drafts = {"trained": "acceptance_length", "served": now_served, "start": "acceptance_length_start"}
        self._acceptance_lengths = {draft: row[name] for draft, name in drafts.items()}
        self._by_label = {label: one[now_served] for label, one in verdict.labels.items()}
        self._drafts.remove_others()
        self._show()

    def _show(self) -> None:
        """Update the figures on the page that Prometheus reads."""
        if self._page is None:
            return
        progress = Progress(
            steps=self._done_steps,
            verdicts=self._num_verdicts,
            pushes=self._drafts.num_pushes,
            waited_s=0.0 if self._budget is None else self._budget.waited_s,
            served_step=self._drafts.served.step,
            acceptance_lengths=self._acceptance_lengths,
            by_label=self._by_label,
        )
        self._page.show(run_metrics(self._config.servers, self._traffic, self._reservoir, progress))

    def _finish(self) -> None:
        """Write a copy of the served draft, a summary and a report into the run directory."""
        directory = self._spec.directory
        spec = self._spec
        trained = read_metrics(directory.metrics)
        self._drafts.copy_into(directory.draft)
        summary = {
            "description": f"{spec.config.draft.name} draft for {spec.target.folder.name} on live traffic",
            "steps": trained[-1]["step"] if trained else 0,  # a cycle may have been interrupted
            "draft": str(directory.draft),
            "served_step": self._drafts.served.step,
            "served_version": self._drafts.served.version,
            "requests": self._reservoir.num_seen,
            "left_out": dict(self._traffic.left_out + self._reservoir.left_out),
        }
        directory.write_summary(summary)
        write_run_card(directory.draft, spec.draft, spec.target, spec.config, summary)
        write_report(directory, f"Training of {summary['description']}", summary)
