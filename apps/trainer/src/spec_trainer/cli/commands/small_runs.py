"""Steps of ``spec-trainer check --thorough`` that train every installed draft as the backend ``cpu`` does."""

from __future__ import annotations

import json
import logging
import random
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from spec_core import Draft, foreign_errors, plugins
from spec_core.errors import ConfigError, PluginError
from spec_processes import hide_broken_extensions
from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from spec_core import Backend

BOUNDS = {"float32": 1e-2, "bfloat16": 3e-2}
"""dtype -> largest relative difference of a loss or a gradient norm from the same run on the CPU in float32.

A device may multiply float32 numbers with ten bits after the point, as TF32 does.
"""
REFERENCE = DEFAULT_PLUGINS["backend"]
_STEPS, _ROWS, _TOKENS, _VOCABULARY = 3, 12, 64, 512


def small_runs() -> dict[str, Callable[[Backend], str]]:
    """Return a step for each draft that can be imported in one process, and for one in the other placements."""
    first = DEFAULT_PLUGINS["draft"]
    places = ("colocated", "disaggregated")
    drafts = [name for name, draft in plugins.load_each(Draft) if isinstance(draft, type)]
    return {
        **{f"train {name}": partial(_train, name, "inline") for name in drafts},
        **{f"train {first}, {place}": partial(_train, first, place) for place in places},
    }


def _train(draft: str, placement: str, backend: Backend) -> str:
    """Train on a target with random weights; return how far losses and gradients differ, and a step's time."""
    hide_broken_extensions()
    with TemporaryDirectory() as folder, _errors_only():
        root = Path(folder)
        _save_target(root / "target")
        _write_rows(root / "rows.jsonl")
        with foreign_errors(PluginError, f"draft {draft!r} does not train on backend {REFERENCE!r} either"):
            expected = _metrics(root, draft, REFERENCE, "inline", "float32")
        found = list[str]()
        for dtype, bound in BOUNDS.items():
            try:
                rows = _metrics(root, draft, backend.name, placement, dtype)
            except ConfigError as error:  # such as too few devices
                return f"not run: {error}"
            worst = {key: _difference(key, rows, expected) for key in ("loss", "grad_norm")}
            differences = ", ".join(f"{key} differs by {value:.0e}" for key, value in worst.items())
            if not max(worst.values()) <= bound:  # or nan
                raise RuntimeError(f"{dtype}: {differences}, but {bound:.0e} is the limit")
            found.append(f"{dtype}: {differences}; {1000 * rows[-1]['time_step_s']:.0f} ms per step")
        return "; ".join(found)


@contextmanager
def _errors_only() -> Generator[None]:
    """Keep the trainer's warnings out of the log: it advises to train longer."""
    log = logging.getLogger("spec_trainer")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _difference(key: str, rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> float:
    return max(abs(row[key] / cpu[key] - 1) for row, cpu in zip(rows, expected, strict=True))


def _metrics(root: Path, draft: str, backend: str, placement: str, dtype: str) -> list[dict[str, Any]]:
    from spec_trainer.cli.commands.train import run_training
    from spec_trainer.plan.resolve import resolve
    from spec_trainer.run.metrics import read_metrics

    flags = {
        "target": str(root / "target"),
        "data.path": str(root / "rows.jsonl"),
        "output": str(root / f"{backend}-{placement}-{dtype}"),
        "draft.name": draft,
        "backend.name": backend,
        "placement.kind": placement,
        "train.dtype": dtype,
        "train.steps": _STEPS,
        "train.global_batch_tokens": 4 * _TOKENS,
        **{f"draft.{key}": value for key, value in plugins.load(Draft, draft).small_run.items()},
    }
    run = resolve(None, flags, ())
    run_training(run)
    return read_metrics(run.directory.metrics)


def _write_rows(file: Path) -> None:
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as rows:
        for _ in range(_ROWS):
            ids = [draw.randrange(_VOCABULARY) for _ in range(draw.randrange(_TOKENS // 2, _TOKENS))]
            rows.write(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n")


def _save_target(folder: Path) -> None:
    """Save a target with YaRN, whose cos and sin exceed 1."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters=yarn,
        initializer_range=0.3,
    )
    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
