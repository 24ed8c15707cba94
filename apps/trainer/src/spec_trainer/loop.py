"""The training loop: reads top-down; everything that it uses was wired in ``job.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spec_core import BatchShare
from spec_core.errors import RunError
from spec_trainer.checkpoint.folder import CheckpointMeta
from spec_trainer.clock import Clock
from spec_trainer.interrupted import Interrupted
from spec_trainer.schedule import learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spec_core import DraftTrainer, TrainStep
    from spec_core.records import StepOutput
    from spec_trainer.checkpoint.store import CheckpointStore
    from spec_trainer.feature_stream import BatchSource
    from spec_trainer.profiling import StepProfiler
    from spec_trainer.resolved_run import ResolvedRun
    from spec_trainer.run_log import RunLog
    from spec_trainer.work_plan import WorkItem


@dataclass(kw_only=True)
class TrainingRun:
    """What one trainer rank holds while it trains."""

    plan: ResolvedRun
    rank: int
    trainer: DraftTrainer
    stream: BatchSource
    checkpoints: CheckpointStore
    log: RunLog
    should_stop: Callable[[int], bool]
    """Asked after every step with the steps done; the same answer on every rank."""
    profiler: StepProfiler
    done_steps: int
    best: float
    """Best held-out acceptance length so far."""
    clock: Clock = field(default_factory=Clock)
    ahead: Iterator[WorkItem] = field(init=False)
    """What comes after the item that is being trained on or evaluated."""

    def __post_init__(self) -> None:
        self.ahead = self.plan.work.items(self.done_steps)
        next(self.ahead, None)


def train(run: TrainingRun) -> dict[str, Any]:
    """Trains from ``done_steps`` to the end; the last record is returned."""
    work, config = run.plan.work, run.plan.config.train
    record: dict[str, Any] = {}
    for item in map(work.train_item, range(run.done_steps, work.total_steps)):
        rate = learning_rate(item.step, work.total_steps, config)
        with run.clock("data"):
            share = BatchShare(
                micro_batches=run.stream.micro_batches(item),
                denominators=work.denominators([item], run.plan.draft),
            )
        with run.clock("step"), run.profiler.step(item.step):
            result = run.trainer.step(share, rate)
            _prepare_next(run)  # while the device computes
            result.grad_norm.item()  # waits for the device: the step's time is the step's
        run.stream.check()
        record = _record(run, item, result, rate)
        _check_finite(run, record)
        run.done_steps = item.step + 1
        run.log.trained(run.done_steps, share)
        if work.evaluates_after(run.done_steps):
            record |= {f"eval_{name}": value for name, value in _evaluate(run).items()}
        run.log.step(record)
        _checkpoint(run, record)
        if run.should_stop(run.done_steps) and run.done_steps < work.total_steps:
            raise Interrupted(f"interrupted; saved {_save(run, record)}; the same command continues there")
    return record


def _prepare_next(run: TrainingRun) -> None:
    following = next(run.ahead, None)
    if following is not None:
        run.stream.prepare(following)


def _evaluate(run: TrainingRun) -> dict[str, Any]:
    """Loss and metrics over the whole held-out set, as if it were one batch."""
    items = run.plan.work.evaluation_items(run.done_steps)
    total: StepOutput | None = None
    with run.clock("evaluate"):
        denominators = run.plan.work.denominators(items, run.plan.draft)
        for item in items:
            share = BatchShare(micro_batches=run.stream.micro_batches(item), denominators=denominators)
            output = run.trainer.evaluate(share)
            _prepare_next(run)
            total = output if total is None else total + output
        assert total is not None
        total.loss.item()
        run.stream.check()
    return {"loss": total.loss.item(), **total.metrics()}


def _record(run: TrainingRun, item: WorkItem, result: TrainStep, rate: float) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    tokens = sum(run.plan.dataset.lengths[sample_id] for sample_id in item.sample_ids)
    data_s, step_s = run.clock.last_s["data"], run.clock.last_s["step"]
    return {
        "step": item.step + 1,
        "epoch": item.epoch,
        "loss": result.output.loss.item(),
        **result.output.metrics(),
        "lr": rate,
        "grad_norm": result.grad_norm.item(),
        "tokens": tokens,
        "samples": len(item.sample_ids),
        "tokens_per_s": tokens / (data_s + step_s),
        "samples_per_s": len(item.sample_ids) / (data_s + step_s),
        "time_s": run.clock.wall_s,
        "time_data_s": data_s,
        "time_step_s": step_s,
    }


def _check_finite(run: TrainingRun, record: dict[str, Any]) -> None:
    """Ends a run whose weights are lost, before a checkpoint of them takes the place of a good one."""
    if math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"]):
        return
    told = f"step {record['step']}: loss {record['loss']}, gradient norm {record['grad_norm']}"
    if record["step"] == 1:
        raise RunError(
            f"{told}, before any weight has changed: target {run.plan.target.folder}, its features or the draft of "
            "draft.init_from hold values that are not finite; check those files"
        )
    newest = run.checkpoints.newest
    left = "no checkpoint was written" if newest is None else f"checkpoint {newest} is sound"
    raise RunError(f"{told}; {left}: lower train.lr or train.clip and start anew")


def _checkpoint(run: TrainingRun, record: dict[str, Any]) -> None:
    score = record.get("eval_acceptance_length")
    better = score is not None and score > run.best
    last = run.done_steps == run.plan.work.total_steps
    if better or last or run.done_steps % run.plan.config.train.save_every == 0:
        _save(run, record, better)
        if better:
            run.best = score


def _save(run: TrainingRun, record: dict[str, Any], best: bool = False) -> Path:
    with run.clock("checkpoint"):
        run.plan.directory.check_still_owned(run.plan.identity)
        meta = CheckpointMeta(
            step=run.done_steps,
            identity=run.plan.identity,
            target_digest=run.plan.target.digest,
            acceptance_length=record.get("eval_acceptance_length"),
        )
        return run.checkpoints.save(run.trainer, meta, run.plan.directory.config.read_text(), best)
