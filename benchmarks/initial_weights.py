"""Compare initial weights, seeds and learning rates at the quickstart's budget; print one JSON document.

A row is a whole run by the product's own loop, then its own sampled decoding of held-out prompts. The scales of
Eagle3's matrices can be varied (``--gains MATRIX FUSION``); for other drafts, leave them at the default.
"""

from __future__ import annotations

import argparse
import email
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine, versions

from spec_core import Draft, plugins
from spec_kit.layers import initial_weights
from spec_trainer.cli.commands.train import run_training
from spec_trainer.cli.quickstart.run import QuickstartSize, held_out_prompts, prepare_files
from spec_trainer.cli.quickstart.tiny_target import TinyTargetConfig
from spec_trainer.plan.resolve import resolve
from spec_trainer.training.wiring import create_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core.records import AcceptanceCounters, SamplingParams
    from spec_trainer.cli.quickstart.run import QuickstartFiles
    from spec_trainer.run.spec import RunSpec

DEFAULT = (initial_weights.MATRIX_GAIN, initial_weights.FUSION_GAIN)


@dataclass(frozen=True)
class Row:
    """A run of the table."""

    draft: str
    gains: tuple[float, float]
    lr: float
    seed: int


def main(arguments: Sequence[str]) -> None:
    """Train and measure every row that the command line asks for, and print the document."""
    options = _options(arguments)
    initial_weights.LOGIT_STD = options.logit_std
    size = _size(options)
    files = prepare_files(size)
    gains = [tuple(pair) for pair in options.gains] or [DEFAULT]
    rows = [
        Row(draft, pair, lr, seed)
        for draft in options.draft
        for pair in gains
        for lr in options.lr
        for seed in options.seed
    ]
    results = [_result(row, size, files, options.word) for row in rows]
    document = {
        "machine": machine(),
        "versions": versions("torch", "transformers", "spec-core", "spec-draft-eagle3", "spec-draft-dflash"),
        "words": [*size.training, *options.word],
        "logit_std": options.logit_std,
        "rows": results,
        "summary": _summary(results),
    }
    print(json.dumps(document, indent=1))


def _result(row: Row, size: QuickstartSize, files: QuickstartFiles, words: list[str]) -> dict[str, Any]:
    print(row, file=sys.stderr)
    initial_weights.MATRIX_GAIN, initial_weights.FUSION_GAIN = row.gains
    with tempfile.TemporaryDirectory() as folder:
        run = _resolved(row, files, Path(folder) / "run", [*size.training, *words])
        summary = run_training(run)
        tau, error = _acceptance(run, size)
    figures = {"held_out_loss": summary["eval_loss"], "acceptance_length": tau, "standard_error": error}
    return {**vars(row), **figures}


def _resolved(row: Row, files: QuickstartFiles, output: Path, words: list[str]) -> RunSpec:
    small = plugins.load_available(Draft, row.draft).small_run
    flags = {
        "target": str(files.target),
        "data.path": str(files.train),
        "data.eval_path": str(files.held_out),
        "draft.name": row.draft,
        "output": str(output),
        **{f"draft.{key}": value for key, value in small.items()},
    }
    return resolve(None, flags, [*words, f"train.lr={row.lr}", f"seed={row.seed}"])


def _acceptance(run: RunSpec, size: QuickstartSize) -> tuple[float, float]:
    """Return the acceptance length over all prompts, and its standard error from how prompts differ."""
    prompts = held_out_prompts(run, size.num_prompts)
    with create_engine(run, run.target) as engine:
        engine.load_draft(run.directory.draft)
        counts: list[tuple[int, int]] = []
        before = engine.acceptance()
        for index, prompt in enumerate(prompts):
            engine.generate([prompt], _seeded(size.sampling, index))
            after = engine.acceptance()
            counts.append(_between(before, after))
            before = after
    rounds, accepted = (sum(column) for column in zip(*counts, strict=True))
    extra = accepted / rounds
    squares = sum((own - extra * tried) ** 2 for tried, own in counts)
    return 1 + extra, math.sqrt(squares * len(counts) / max(1, len(counts) - 1)) / rounds


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return ``sampling`` with a seed for this prompt, which is always the first of its call."""
    return replace(sampling, seed=index)


def _between(before: AcceptanceCounters, after: AcceptanceCounters) -> tuple[int, int]:
    return after.rounds - before.rounds, after.accepted - before.accepted


def _summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean, spread and worst draw of each draft, scheme and rate."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in results:
        groups.setdefault((row["draft"], row["gains"], row["lr"]), []).append(row["acceptance_length"])
    return [
        {
            "draft": draft,
            "gains": gains,
            "lr": lr,
            "draws": len(lengths),
            "mean": statistics.fmean(lengths),
            "deviation": statistics.stdev(lengths) if len(lengths) > 1 else None,
            "worst": min(lengths),
        }
        for (draft, gains, lr), lengths in groups.items()
    ]


def _size(options: argparse.Namespace) -> QuickstartSize:
    if not options.toy:
        return QuickstartSize()
    size = QuickstartSize()
    target = TinyTargetConfig(
        vocab_size=300,
        num_layers=8,
        hidden_size=32,
        num_heads=1,
        num_kv_heads=1,
        intermediate_size=32,
        batch_size=2,
        steps=2,
    )
    words = ("train.steps=2", "train.global_batch_tokens=256", "data.max_length=64")
    return replace(
        size,
        target=target,
        library=Path(email.__file__).parent,
        training=words,
        num_prompts=2,
        sampling=replace(size.sampling, max_new_tokens=8),
    )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--draft", nargs="+", default=["eagle3"])
    add("--gains", nargs=2, type=float, action="append", default=[], metavar=("MATRIX", "FUSION"))
    add("--logit-std", type=float, default=initial_weights.LOGIT_STD, help="inf: the target's own final norm")
    add("--lr", nargs="+", type=float, default=[5e-3])
    add("--seed", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    add("--word", action="append", default=[], help="section.key=value, such as optimizer.betas=[0.9,0.95]")
    add("--toy", action="store_true", help="a tiny target, little text and two steps, to see that it runs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
