"""Builds the parts of a resolved run, one trainer rank or one inline engine at a time, and connects them."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from spec_core.engine import EngineContext
from spec_trainer.checkpoint.folder import read_meta
from spec_trainer.checkpoint.store import CheckpointStore
from spec_trainer.dispatch import Dispatcher
from spec_trainer.draft_trainer import ShardedDraftTrainer
from spec_trainer.loop import TrainingRun
from spec_trainer.metrics import read_metrics
from spec_trainer.profiling import StepProfiler
from spec_trainer.report import write_report
from spec_trainer.run_log import RunLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch.distributed import Store

    from spec_core import DraftTrainer
    from spec_trainer.feature_stream import BatchSource, FeatureStream
    from spec_trainer.resolved_run import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class RankLinks:
    """What ties a trainer rank to the rest of its run, whichever processes that is in."""

    store: Store
    """Where the ranks meet for torch's default group."""
    should_stop: Callable[[int], bool]
    """Asked after every step with the steps done; the same answer on every rank."""
    show: Callable[[dict[str, Any]], None]
    """Takes rank 0's record of each step to the person."""


@contextmanager
def engine_stream(
    plan: ResolvedRun, device: torch.device
) -> Iterator[tuple[FeatureStream, Callable[[int], None]]]:
    """An engine in this process: what it captures, and what begins the capture, given the steps done."""
    from spec_trainer.feature_stream import FeatureStream

    with ExitStack() as stack:
        transport = plan.backend.transport("inline")
        context = EngineContext(backend=plan.backend, placement="inline", transport=transport)
        engine = stack.enter_context(plan.engine_type.create(plan.config.engine, plan.target, context))
        engine.start(plan.schema)
        receiver = stack.enter_context(transport.listen(plan.schema, plan.window_bytes))
        dispatcher = Dispatcher(plan.work, plan.schema, [engine], [receiver.address], plan.window_bytes)
        stack.callback(dispatcher.stop)
        stream = FeatureStream(plan.work, 0, receiver, plan.schema, plan.config, device, dispatcher.released)
        yield stream, lambda done: dispatcher.start(plan.work.items(done), failed=stream.fail)


@contextmanager
def training_run(
    plan: ResolvedRun,
    rank: int,
    device: torch.device,
    stream: BatchSource,
    links: RankLinks,
) -> Iterator[TrainingRun]:
    """One trainer rank, resumed from the checkpoint that ``run_training`` has chosen."""
    import torch.distributed as dist

    with ExitStack() as stack:
        stack.enter_context(_default_group(plan, rank, links.store))
        trainer = _build_trainer(plan, device)
        checkpoints = CheckpointStore(plan.directory.checkpoints, plan.config.train.keep, dist.group.WORLD)
        start, best = plan.config.train.resume_from, checkpoints.best()
        # The launcher has chosen a checkpoint by name, or "latest" where there is none.
        done_steps = (
            0 if start == "latest" else checkpoints.load(trainer, plan.directory.checkpoints / start).step
        )
        yield TrainingRun(
            plan=plan,
            rank=rank,
            trainer=trainer,
            stream=stream,
            checkpoints=checkpoints,
            log=stack.enter_context(RunLog(plan, rank, done_steps, links.show)),
            should_stop=links.should_stop,
            profiler=StepProfiler(plan.config.profile.steps if rank == 0 else (), plan.directory.root),
            done_steps=done_steps,
            best=(read_meta(best).acceptance_length or 0.0) if best else 0.0,
        )


def _build_trainer(plan: ResolvedRun, device: torch.device) -> DraftTrainer:
    import torch

    from spec_core.targets.target_reader import read_target_tensors

    # Every rank draws the same initial weights; afterwards each has its own generator.
    torch.manual_seed(plan.config.seed)
    random.seed(plan.config.seed)
    tensors = read_target_tensors(plan.target)
    counts = torch.from_numpy(plan.dataset.token_counts(plan.target.vocab_size))
    module = plan.draft.build(plan.target, tensors, counts, plan.backend.kernel)
    strategy = plan.strategy_type(plan.config.train, device)
    ops = strategy.vocabulary_ops(plan.target, tensors)
    return ShardedDraftTrainer(plan.draft, module, strategy, ops)


@contextmanager
def _default_group(plan: ResolvedRun, rank: int, store: Store) -> Iterator[None]:
    """torch's default group, among the trainer's ranks only; no engine ever joins it."""
    import torch.distributed as dist

    from spec_core.streams.gloo_members import closed_afterwards, prove_default_group

    with closed_afterwards():
        dist.init_process_group(
            plan.backend.dist_backend,
            store=store,
            rank=rank,
            world_size=plan.config.train.ranks,
            # A rank may wait for another that waits for features; who is alive is the supervisor's to watch.
            timeout=timedelta(seconds=plan.config.timeouts.step_s),
        )
        prove_default_group(store, plan.config.timeouts.start_s)
    try:
        yield
    finally:
        dist.destroy_process_group()


def finish(run: TrainingRun, last: dict[str, Any]) -> dict[str, Any]:
    """Exports the trained draft, then summary and report."""
    directory = run.plan.directory
    directory.check_still_owned(run.plan.identity)
    with run.clock("export"):
        run.trainer.export(run.plan.target, directory.draft)
    if run.rank != 0:
        return {}
    summary = (None if last else _kept_summary(run)) or _summary(run, last)
    directory.write_summary(summary)
    write_report(directory, f"Training of {summary['description']}", summary)
    return summary


def _kept_summary(run: TrainingRun) -> dict[str, Any] | None:
    """The summary of an earlier incarnation that left nothing to do: it knows the times."""
    file = run.plan.directory.summary
    kept = json.loads(file.read_text()) if file.exists() else {}
    return kept if kept.get("steps") == run.done_steps else None


def _summary(run: TrainingRun, last: dict[str, Any]) -> dict[str, Any]:
    directory = run.plan.directory
    last = last or next(reversed(read_metrics(directory.metrics)), {})
    return {
        "description": f"{run.plan.config.draft.name} draft for {run.plan.target.folder.name}",
        "steps": run.done_steps,
        "tokens": _trained_tokens(run),
        **{key: value for key, value in last.items() if key == "loss" or key.startswith("eval_")},
        "simulated_acceptance_length": last.get("acceptance_length"),
        "wall_s": run.clock.wall_s,
        "time_s": run.clock.breakdown(),
        "draft": str(directory.draft),
        "data": str(run.plan.dataset.report),
    }


def _trained_tokens(run: TrainingRun) -> int:
    """Tokens of every step of the run, those of earlier incarnations included."""
    lengths, work = run.plan.dataset.lengths, run.plan.work
    items = map(work.train_item, range(run.done_steps))
    return sum(lengths[sample_id] for item in items for sample_id in item.sample_ids)
