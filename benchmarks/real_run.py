"""Run ``spec-trainer train`` on random data and read its steady state from its metrics."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import yaml
from commands import output_of
from random_dataset import write_random_dataset
from trace_table import trace_table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainer_step import Case

SPEC_TRAINER = [sys.executable, "-c", "from spec_trainer.cli.app import main; main()"]
"""The console script; works where the packages are only on PYTHONPATH, too."""
SECTIONS = ("backend", "engine", "placement", "train")
"""Sections of the resolved configuration that the document repeats."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to measure: engines, trainer ranks, their placement, and how long they run."""

    placement: str
    replicas: int
    ranks: int
    target_parallel: int
    """Devices over which one engine replica spreads."""
    draft_parallel: int
    """Ranks that divide one draft by tensors: they train the same samples."""
    engine: str
    case: Case
    """Work of one step of one rank."""
    steps: int
    warm_up: int
    """Steps before the ones that are timed."""
    cool_down: int
    """Steps after them. The engine is ahead of the trainer by what fits the window, and done so much earlier."""
    profile_step: int | None
    words: tuple[str, ...]
    """section.key=value words that are added to what the benchmark sets."""
    target: Path
    folder: Path
    limit_s: float

    @property
    def samples_per_step(self) -> int:
        """Samples of one step of all ranks."""
        return self.ranks // self.draft_parallel * self.case.passes * self.case.sequences

    @property
    def output(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    def engine_words(self) -> list[str]:
        """Return the key=value words of section ``engine``."""
        return [word.removeprefix("engine.") for word in self.words if word.startswith("engine.")]


def settings(run: Run, data: Path) -> dict[str, object]:
    """Return the run's configuration: nothing but training between the first step and the last."""
    case = run.case
    draft = {f"draft.{name}": value for name, value in case.draft_options().items()}
    divided = {} if run.draft_parallel == 1 else {"strategy.tensor_parallel": run.draft_parallel}
    profile = {} if run.profile_step is None else {"profile.steps": [run.profile_step]}
    return {
        "target": run.target,
        "output": run.output,
        "backend.name": case.backend,
        "data.path": data,
        "data.max_length": case.tokens,
        "data.eval_samples": 0,
        "draft.name": case.draft,
        **draft,
        "engine.name": run.engine,
        "engine.replicas": run.replicas,
        "engine.tensor_parallel": run.target_parallel,
        "placement.kind": run.placement,
        "train.ranks": run.ranks,
        "train.steps": run.steps,
        "train.dtype": case.dtype,
        "train.accumulation": case.passes,
        "train.global_batch_tokens": run.samples_per_step * case.tokens,
        "train.save_every": run.steps,
        **divided,
        **profile,
    }


def measured(run: Run) -> dict[str, Any]:
    """Train on every sample once and return the figures that the run has written."""
    case = run.case
    data = write_random_dataset(
        run.folder / "data.jsonl",
        run.steps * run.samples_per_step,
        case.tokens,
        case.vocab_size,
        1 - (case.unsupervised or 0.0),
    )
    words = [f"{key}={value}" for key, value in settings(run, data).items()] + list(run.words)
    log = run.folder / "spec-trainer.log"
    output_of([*SPEC_TRAINER, "train", *words], log, run.limit_s, run.output / "logs")
    lines = (run.output / "metrics.jsonl").read_text().splitlines()
    config = yaml.safe_load((run.output / "config.yaml").read_text())
    return {
        "command": ["spec-trainer", "train", *words],
        "config": {section: config[section] for section in SECTIONS},
        "warnings": [line for line in log.read_text().splitlines() if " W " in line],
        **steady_state([json.loads(line) for line in lines], run.warm_up, run.cool_down),
        **_profile(run),
    }


def steady_state(records: Sequence[dict[str, Any]], warm_up: int, cool_down: int) -> dict[str, Any]:
    """Return the figures of the steps after ``warm_up`` (at least 1) and before the last ``cool_down``.

    Times go from the end of one step to the end of another.
    """
    records = records[: len(records) - cool_down]
    timed, ends = records[warm_up:], [record["time_s"] for record in records[warm_up - 1 :]]
    elapsed = ends[-1] - ends[0]
    steps_ms = [1e3 * (end - start) for start, end in pairwise(ends)]
    tenths = statistics.quantiles(steps_ms, n=10, method="inclusive")
    samples, half = [record["samples"] for record in timed], len(timed) // 2
    peak = max(record.get("memory_device_bytes", 0) for record in records)
    return {
        "steps": len(timed),
        "elapsed_s": elapsed,
        "samples_per_s": sum(samples) / elapsed,
        "tokens_per_s": sum(record["tokens"] for record in timed) / elapsed,
        "data_wait_share": sum(record["time_data_s"] for record in timed) / elapsed,
        "interval_ms": {"median": statistics.median(steps_ms), "p10": tenths[0], "p90": tenths[-1]},
        "step_ms": 1e3 * statistics.median(record["time_step_s"] for record in timed),
        "halves_samples_per_s": [
            sum(samples[:half]) / (ends[half] - ends[0]),
            sum(samples[half:]) / (ends[-1] - ends[half]),
        ],
        "losses": [records[0]["loss"], records[-1]["loss"]],
        **({"trainer_peak_mib": peak / 2**20} if peak else {}),
    }


def _profile(run: Run) -> dict[str, Any]:
    if run.profile_step is None:
        return {}
    return {"profile": trace_table(run.output / f"profile-step-{run.profile_step}.json")}
