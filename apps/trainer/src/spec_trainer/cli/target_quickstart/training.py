"""Train the draft of a round: time some steps, then make as many as the time allows.

It is one run throughout. Its first steps are as those of a longer run, because only the decay of the learning rate
depends on the number of steps, and a run may be resumed with another one.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

from spec_core import Backend
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.cli.commands.train import run_training
from spec_trainer.cli.target_quickstart.budget import TRAINING
from spec_trainer.cli.target_quickstart.folder import Round, read_all, read_document, write_document
from spec_trainer.cli.target_quickstart.recipe import draft_options, training_words
from spec_trainer.cli.target_quickstart.work import Work
from spec_trainer.plan.resolve import resolve
from spec_trainer.run.metrics import read_metrics
from spec_trainer.run.spec import RunSpec

log = logging.getLogger(__name__)

MORE_STEPS = "give a larger --budget, and the same command trains the draft further"
"""The advice to a user whose run has too few steps."""
_TIMED_SHARE = 0.25
"""Share of the time, from the first step on, after which the steps so far say how many more there can be."""
_MOST_TIMED = 0.6
"""Share of the time after which they say it at the latest, however long the engine has taken to start."""
_UNKNOWN_STEPS = 100_000
"""Number of steps of the run before its pace is known."""
_SAFETY = 0.9
"""Share of the time that is planned, because others may use the machine, too."""
_SAVE_EVERY_S = 60.0


def train_draft(work: Work, one: Round, earlier: Sequence[Round], limit: TimeLimit) -> None:
    """Train the draft of a round; go on with its run if it was begun."""
    if not one.recipe.exists():
        write_document(one.recipe, _recipe(work, one, earlier))
    if "steps" not in read_document(one.recipe):
        _time_steps(work, one, limit)
    run = resolved_run(work, one)
    try:
        run_training(run, TimeLimit(limit.left_s - _reserve_s(work, one)), MORE_STEPS)
    except Interrupted:
        if limit.left_s > _reserve_s(work, one):  # not the limit, but the user has stopped it
            raise
        _note_pace(one, _done_steps(one) + 1)
        run_training(resolved_run(work, one), more_steps=MORE_STEPS)
    _return_memory(run.backend)


def _return_memory(backend: Backend) -> None:
    """Return the memory that training in this process has left cached, for the engine that measures the draft."""
    import torch

    gc.collect()
    if backend.device_type != Backend.device_type:  # not the CPU's
        torch.get_device_module(backend.device_type).empty_cache()


def resolved_run(work: Work, one: Round) -> RunSpec:
    """Return the run of a round, as far as its number of steps is known."""
    recipe = read_document(one.recipe)
    flags: dict[str, Any] = {
        "target": str(work.target.folder),
        "data.path": str(one.training),
        "backend.name": work.machine.backend,
        "draft.name": work.request.draft,
        "engine.name": recipe["engine"],
        "output": str(one.run),
        "seed": work.request.seed,
        "train.steps": recipe.get("steps", _UNKNOWN_STEPS),
        "train.save_every": recipe.get("save_every", _UNKNOWN_STEPS),
    }
    return resolve(None, flags, recipe["words"])


def _recipe(work: Work, one: Round, earlier: Sequence[Round]) -> dict[str, Any]:
    num_tokens = sum(len(row["input_ids"]) for row in read_all(one.training))
    engine, engine_words = work.training_engine(one.budget_s)
    options = draft_options(work.draft_type, work.target, work.machine, one.budget_s)
    if earlier:  # without the option, the vocabulary stays that of the earlier draft
        options.pop("vocab_size", None)
    words = [
        *(f"draft.{key}={value}" for key, value in options.items()),
        *([f"draft.init_from={earlier[-1].draft}"] if earlier else ()),
        *training_words(work.target, work.machine, num_tokens, one.budget_s),
        *engine_words,
        f"data.max_length={work.lengths.both}",
    ]
    return {"engine": engine.config.engine.name, "words": words, "training_tokens": num_tokens}


def _time_steps(work: Work, one: Round, limit: TimeLimit) -> None:
    """Train for a share of the time, and write down how many steps the rest allows."""
    log.info("timing training steps for %.0f s", _TIMED_SHARE * limit.left_s)
    begin_s = limit.left_s
    timed = TimeLimit(_TIMED_SHARE * begin_s, has_begun=False)
    most = TimeLimit(_MOST_TIMED * limit.left_s)
    try:
        run_training(resolved_run(work, one), most, steps_limit=timed)
    except Interrupted:
        if not (timed.is_over or most.is_over):  # no limit, but the user has stopped it
            raise
    step_s = _step_s(one)
    around_s = max(0.0, begin_s - limit.left_s - step_s * _done_steps(one))
    left_s = limit.left_s - around_s - (around_s if _starts_at_once(work, one) else 0.0)
    _note_pace(one, _done_steps(one) + max(1, int(_SAFETY * left_s / step_s)), step_s, around_s)
    log.info("a step takes %.2f s: %d steps", step_s, read_document(one.recipe)["steps"])


def _note_pace(one: Round, steps: int, step_s: float | None = None, around_s: float | None = None) -> None:
    recipe = read_document(one.recipe)
    recipe["steps"] = steps
    if step_s is not None:
        recipe |= {"step_s": step_s, "around_s": around_s, "save_every": max(1, int(_SAVE_EVERY_S / step_s))}
    write_document(one.recipe, recipe)


def _reserve_s(work: Work, one: Round) -> float:
    """Return the seconds that are left for a run that is too slow to be ended; none if it starts slowly."""
    return _around_s(one) if _starts_at_once(work, one) else 0.0


def _starts_at_once(work: Work, one: Round) -> bool:
    return TRAINING not in work.slow_starts(one.budget_s)


def _around_s(one: Round) -> float:
    """Return the seconds that a call of the training takes besides its steps."""
    return float(read_document(one.recipe).get("around_s", 0.0))


def _done_steps(one: Round) -> int:
    return max((row["step"] for row in _metrics(one)), default=0)


def _step_s(one: Round) -> float:
    """Return the mean seconds of a step, without the first one, which is slower, if there are more."""
    seconds = [row["time_data_s"] + row["time_step_s"] for row in _metrics(one)]
    steady = seconds[1:] or seconds or [_SAVE_EVERY_S]
    return sum(steady) / len(steady)


def _metrics(one: Round) -> list[dict[str, Any]]:
    file = one.run / "metrics.jsonl"
    return read_metrics(file) if file.exists() else []
