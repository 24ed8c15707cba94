"""This module is the training loop. ``wiring.py`` builds the objects that it uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spec_core.errors import RunError
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.run.draft_trainer import BatchShare
from spec_trainer.training.checkpoint.folder import CheckpointMeta, step_of
from spec_trainer.training.learning_rate import learning_rate
from spec_trainer.training.memory_used import memory_used

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    from spec_core import TrainStep
    from spec_core.records import StepOutput
    from spec_trainer.push.live_measurements import LiveMeasurements
    from spec_trainer.push.live_pushes import LivePushes
    from spec_trainer.run.batch_schedule import GlobalBatch
    from spec_trainer.run.draft_trainer import DraftTrainer
    from spec_trainer.run.feature_stream import BatchSource
    from spec_trainer.run.log import RunLog
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.run.timer import Timer
    from spec_trainer.training.checkpoint.store import CheckpointStore
    from spec_trainer.training.profiling import StepProfiler


@dataclass(kw_only=True)
class TrainState:
    """The state of one trainer process during training."""

    spec: RunSpec
    rank: int
    device: torch.device
    trainer: DraftTrainer
    stream: BatchSource
    checkpoints: CheckpointStore
    log: RunLog
    should_stop: Callable[[int], bool]
    """Called after every step with the number of steps done; returns the same on every process."""
    profiler: StepProfiler
    pushes: LivePushes
    measurements: LiveMeasurements
    done_steps: int
    best: float
    """Best held-out acceptance length so far."""
    timer: Timer
    notes: Callable[[], dict[str, Any]]
    """Returns fields for the record of each step, such as which draft the run's engine serves."""
    ahead: Iterator[GlobalBatch] = field(init=False)
    """Items of the schedule after the item that is being trained on or evaluated."""

    def __post_init__(self) -> None:
        """Set ``ahead`` to start at the item after the first one to train on."""
        self.ahead = self.spec.schedule.items(self.done_steps)
        next(self.ahead, None)


def train(state: TrainState) -> dict[str, Any]:
    """Train from ``done_steps`` to the end of the schedule; return the metrics of the last step."""
    schedule = state.spec.schedule
    config = state.spec.config.train
    record: dict[str, Any] = {}
    for item in map(schedule.train_item, range(state.done_steps, schedule.steps.stop)):
        rate = learning_rate(item.step, schedule.total_steps, config)
        with state.timer("data"):
            share = BatchShare(
                micro_batches=state.stream.micro_batches(item),
                denominators=schedule.denominators((item,), state.spec.draft),
            )
        with state.timer("step"), state.profiler.step(item.step):
            result = state.trainer.step(share, rate)
            _prepare_next(state)  # while the device computes
            result.grad_norm.item()  # waits for the device, so that the timer measures the whole step
        state.stream.check()
        record = _record(state, item, result, rate) | state.notes()
        _check_finite(state, record)
        state.done_steps = item.step + 1
        state.log.trained(state.done_steps, share)
        if schedule.evaluates_after(state.done_steps):
            record |= {f"eval_{name}": value for name, value in _evaluate(state).items()}
        record |= _hand_over(state, state.measurements, "serve")
        state.log.step(record | _hand_over(state, state.pushes, "push"))
        _checkpoint(state, record)
        if state.should_stop(state.done_steps) and state.done_steps < schedule.total_steps:
            raise Interrupted(f"interrupted; saved {_save(state, record)}; the same command continues there")
    return record


def _prepare_next(state: TrainState) -> None:
    following = next(state.ahead, None)
    if following is not None:
        state.stream.prepare(following)
        if not following.evaluates:
            state.spec.schedule.denominators((following,), state.spec.draft)


def _hand_over(state: TrainState, to: LivePushes | LiveMeasurements, name: str) -> dict[str, Any]:
    """Begin the push or the measurement ``to`` of the draft if it is due; return fields for metrics.

    ``name``: the beginning of a field's name.
    """
    fields: dict[str, Any] = {}
    if to.is_due(state.done_steps):
        with state.timer(name):
            to.begin(state.done_steps, state.trainer)
        fields[f"{name}_wait_s"] = state.timer.last_s[name]
    return fields | to.new_fields()


def _evaluate(state: TrainState) -> dict[str, Any]:
    """Return loss and metrics over the whole held-out set, as if it were one batch."""
    items = state.spec.schedule.evaluation_items(state.done_steps)
    total: StepOutput | None = None
    with state.timer("evaluate"):
        denominators = state.spec.schedule.denominators(tuple(items), state.spec.draft)
        for item in items:
            share = BatchShare(micro_batches=state.stream.micro_batches(item), denominators=denominators)
            output = state.trainer.evaluate(share)
            _prepare_next(state)
            total = output if total is None else total + output
        assert total is not None
        total.loss.item()
        state.stream.check()
    return {"loss": total.loss.item(), **total.metrics()}


def _record(state: TrainState, item: GlobalBatch, result: TrainStep, rate: float) -> dict[str, Any]:
    """Return the metrics of one step, for a row of metrics.jsonl."""
    tokens = sum(state.spec.dataset.lengths[sample_id] for sample_id in item.sample_ids)
    data_s, step_s = state.timer.last_s["data"], state.timer.last_s["step"]
    return {
        "step": item.step + 1,
        "epoch": item.epoch,
        "loss": result.output.loss.item(),
        **result.output.metrics(),
        "lr": rate,
        "grad_norm": result.grad_norm.item(),
        "tokens": tokens,
        "samples": len(item.sample_ids),
        "tokens_max_over_mean": state.spec.schedule.imbalance(item),
        "cost_max_over_mean": state.spec.schedule.cost_imbalance(item),
        "tokens_per_s": tokens / (data_s + step_s),
        "samples_per_s": len(item.sample_ids) / (data_s + step_s),
        "time_s": state.timer.wall_s,
        "time_data_s": data_s,
        "time_step_s": step_s,
        **memory_used(state.device),
    }


def _check_finite(state: TrainState, record: dict[str, Any]) -> None:
    """Raise RunError if the loss or the gradient norm is not finite; no checkpoint is written then."""
    if math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"]):
        return
    values = f"step {record['step']}: loss {record['loss']}, gradient norm {record['grad_norm']}"
    if record["step"] == 1:
        raise RunError(
            f"{values}, before any weight has changed: target {state.spec.target.folder}, its features or the draft "
            "of draft.init_from hold values that are not finite; check those files"
        )
    left = _what_is_left(state.checkpoints.newest, record["step"])
    raise RunError(f"{values}; {left}: lower train.lr or train.clip and start anew")


def _what_is_left(newest: Path | None, step: int) -> str:
    if newest is None:
        return "no checkpoint was written"
    if step_of(newest) == step - 1:
        return f"checkpoint {newest} holds the weights that gave this, an earlier one may be sound"
    return f"checkpoint {newest} is sound"


def _checkpoint(state: TrainState, record: dict[str, Any]) -> None:
    score = record.get("eval_acceptance_length")
    better = score is not None and score > state.best
    last = state.done_steps == state.spec.schedule.steps.stop
    if better or last or state.done_steps % state.spec.config.train.save_every == 0:
        _save(state, record, better)
        if better:
            state.best = score


def _save(state: TrainState, record: dict[str, Any], best: bool = False) -> Path:
    with state.timer("checkpoint"):
        state.spec.directory.check_still_owned(state.spec.identity)
        meta = CheckpointMeta(
            step=state.done_steps,
            identity=state.spec.identity,
            target_digest=state.spec.target.digest,
            acceptance_length=record.get("eval_acceptance_length"),
        )
        return state.checkpoints.save(
            state.trainer, meta, state.spec.directory.config.read_text(encoding="utf-8"), best
        )
