"""Compare drafts and optimizers over seeds at the quickstart's budget; print one JSON document.

A row is a whole run by the product's own loop, then its own decoding of held-out prompts: sampled at the quickstart's
temperature, and greedy. Rows run side by side in ``--jobs`` processes: CPU seconds count, wall time does not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine, versions

from spec_core import Backend, Draft, plugins
from spec_trainer.commands.train import run_training
from spec_trainer.quickstart.run import QuickstartSize, held_out_prompts, prepare_files
from spec_trainer.resolve import resolve
from spec_trainer.training.wiring import create_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_trainer.quickstart.run import QuickstartFiles
    from spec_trainer.run.spec import RunSpec


@dataclass(frozen=True)
class Row:
    """A run of the table: a variant is a draft and the words that are added to the quickstart's."""

    draft: str
    words: tuple[str, ...]
    seed: int


def main(arguments: Sequence[str]) -> None:
    """Train and measure every row that the command line asks for, and print the document."""
    options = _options(arguments)
    backend = plugins.load_available(Backend, options.backend)
    size = QuickstartSize()
    files = prepare_files(size, device=backend(backend.Config()).device(0))
    variants = [(draft, *words.split()) for draft, _, words in (v.partition(" ") for v in options.variant)]
    rows = [Row(draft, tuple(words), seed) for draft, *words in variants for seed in options.seed]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, max_tasks_per_child=1) as pool:
        pending = [pool.submit(_result, row, size, files, options.backend) for row in rows]
        results = [future.result() for future in pending]
    document = {
        "machine": machine(),
        "versions": versions("torch", "transformers", "spec-core"),
        "words": size.training,
        "backend": options.backend,
        "summary": _summary(results),
        "rows": results,
    }
    print(json.dumps(document, indent=1))


def _result(row: Row, size: QuickstartSize, files: QuickstartFiles, backend: str) -> dict[str, Any]:
    before = _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        run = _resolved(row, size, files, backend, Path(folder) / "run")
        summary = run_training(run)
        trained = _cpu_seconds()
        sampled, greedy = _acceptance(run, size)
    print(row, sampled, greedy, file=sys.stderr, flush=True)
    return {
        **vars(row),
        "held_out_loss": summary["eval_loss"],
        "sampled": sampled,
        "greedy": greedy,
        "training_cpu_s": trained - before,
    }


def _resolved(row: Row, size: QuickstartSize, files: QuickstartFiles, backend: str, output: Path) -> RunSpec:
    small = plugins.load_available(Draft, row.draft).small_run
    flags = {
        "target": str(files.target),
        "data.path": str(files.train),
        "data.eval_path": str(files.held_out),
        "backend.name": backend,
        "draft.name": row.draft,
        "output": str(output),
        "seed": row.seed,
        **{f"draft.{key}": value for key, value in small.items()},
    }
    return resolve(None, flags, [*size.training, *row.words])


def _acceptance(run: RunSpec, size: QuickstartSize) -> tuple[float, float]:
    """Return the acceptance lengths of sampled and of greedy decoding over all prompts."""
    prompts = held_out_prompts(run, size.num_prompts)
    lengths: list[float] = []
    with create_engine(run, run.target) as engine:
        engine.load_draft(run.directory.draft)
        for temperature in (size.sampling.temperature, 0.0):
            before = engine.acceptance()
            engine.generate(prompts, replace(size.sampling, temperature=temperature, seed=0))
            after = engine.acceptance()
            lengths.append(1 + (after.accepted - before.accepted) / (after.rounds - before.rounds))
    return lengths[0], lengths[1]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean, spread and worst draw of each variant."""
    groups: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault((row["draft"], row["words"]), []).append(row)
    return [
        {
            "draft": draft,
            "words": words,
            "draws": len(rows),
            **{key: _spread([row[key] for row in rows]) for key in ("sampled", "greedy")},
            "training_cpu_s": statistics.fmean(row["training_cpu_s"] for row in rows),
        }
        for (draft, words), rows in groups.items()
    ]


def _spread(lengths: list[float]) -> dict[str, float | None]:
    deviation = statistics.stdev(lengths) if len(lengths) > 1 else None
    return {"mean": statistics.fmean(lengths), "deviation": deviation, "worst": min(lengths)}


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--variant", action="append", required=True, metavar="'DRAFT [section.key=value …]'")
    add("--seed", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    add("--backend", default="cpu")
    add("--jobs", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
