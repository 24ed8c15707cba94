"""``spec-trainer follow``: train a draft on live requests of running servers, and push better versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from spec_core import Transport
from spec_core.errors import ConfigError
from spec_trainer.base.progress import StepProgress
from spec_trainer.base.stop_request import StopRequest
from spec_trainer.configuration.server_url import same_server
from spec_trainer.live.follow_run import FollowRun
from spec_trainer.live.kept_states import KeptStates
from spec_trainer.live.metrics_page import MetricsPage
from spec_trainer.live.own_server import OwnServer, check_own_server, url_of
from spec_trainer.live.reservoir import Reservoir
from spec_trainer.live.retention import open_retained
from spec_trainer.plan.resolve import read_inputs
from spec_trainer.push.servers import check_sender
from spec_trainer.run.dispatch import sample_bytes
from spec_trainer.run.log import cut_records
from spec_trainer.run.spec import RunParts, RunSpec
from spec_trainer.training.checkpoint.folder import step_of
from spec_trainer.training.checkpoint.resume import CommandCheckpoints
from spec_trainer.training.checkpoint.store import check_strategy
from spec_trainer.workers.inline_driver import inline_driver
from spec_trainer.workers.run_driver import RunDriver
from spec_trainer.workers.worker_driver import worker_driver


def resolve_follow(
    config_file: Path | None, flags: Mapping[str, object], overrides: Sequence[str]
) -> RunSpec:
    """Return the run that a command line describes; create nothing.

    Raise UsageError, with a message of one line, if the command line or an input is wrong.
    """
    parts, replayed = read_inputs(config_file, flags, overrides, follows=True)
    if parts.config.follow.serve.engine is not None:
        parts = _with_own_server(parts)
    check_sender(parts)
    if parts.config.follow.metrics is not None:
        MetricsPage(parts.config.follow.metrics).close()
    longest = min(parts.config.data.max_length, parts.target.max_positions)
    if longest > (most := parts.config.engine.batch_tokens):
        raise ConfigError(
            f"engine.batch_tokens={most} with follow is smaller than a request may be ({longest} tokens); raise it "
            f"to {longest} or set data.max_length={most}"
        )
    window = sample_bytes(parts.schema, 2 * max(longest, parts.config.train.global_batch_tokens))
    placement = parts.config.placement.model_copy(update={"window_bytes": window})
    config = parts.config.model_copy(update={"placement": placement})
    spec = replace(parts, config=config).with_dataset(replayed)
    spec.members()
    spec.directory.check_owner(spec.identity)
    return spec


def run_follow(spec: RunSpec) -> dict[str, Any]:
    """Run the command until ``follow.requests`` requests have arrived, and return the summary.

    The run resumes from its run directory. If the command is stopped, write the summary, too, and raise Interrupted.
    """
    with spec.directory.locked(), StopRequest() as stop:
        spec.directory.open(spec.identity, spec.resuming("latest").config)
        first = CommandCheckpoints(
            spec.directory.checkpoints, spec.config.train.resume_from, spec.identity
        ).first
        if first is not None:
            check_strategy(spec.strategy_type, first)
        done_steps = step_of(first) if first else 0
        cut_records(spec.directory, done_steps)
        follow = spec.config.follow

        def open_driver(spec: RunSpec, reservoir: Reservoir) -> AbstractContextManager[RunDriver]:
            progress = StepProgress(None, "following", says_waits=False)
            if follow.capture == "serving":
                return inline_driver(spec, stop, progress, open_source=partial(_kept_states, spec, reservoir))
            opened = inline_driver if spec.config.placement.kind == "inline" else worker_driver
            return opened(spec, stop, progress)

        try:
            with (
                nullcontext() if follow.serve.engine is None else OwnServer(spec, stop) as server,
                open_retained(spec.directory, follow.retention) or nullcontext() as retained,
                nullcontext() if follow.metrics is None else MetricsPage(follow.metrics) as page,
            ):
                FollowRun(spec, open_driver, stop, done_steps, page, retained, server).run()
        finally:
            spec.directory.remove_unfinished()
    return spec.directory.read_summary()


def _with_own_server(parts: RunParts) -> RunParts:
    """Return the run with the address of its own server among ``follow.servers``.

    Raise UsageError if the server cannot be started here.
    """
    check_own_server(parts)
    follow = parts.config.follow
    own = url_of(parts.config)
    others = (url for url in follow.servers if not same_server(url, own))
    follow = follow.model_copy(update={"servers": (own, *others)})
    return replace(parts, config=parts.config.model_copy(update={"follow": follow}))


def _kept_states(spec: RunSpec, reservoir: Reservoir, transport: Transport) -> KeptStates:
    return KeptStates(reservoir.states, transport, spec.config.timeouts.step_s)
