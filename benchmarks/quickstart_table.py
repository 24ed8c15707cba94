"""Compare drafts and optimizers over seeds at the quickstart's budget; print one JSON document.

A row is a whole run by the product's own loop, then its own decoding of held-out prompts: sampled at the quickstart's
temperature, and greedy. Rows run side by side in ``--jobs`` processes: CPU seconds count, wall time does not.
``speedup`` is a ratio of CPU seconds, too: those of one thread that samples four texts at a time without the draft,
over those with it. Each row is printed on standard error as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine, versions

from spec_core import Backend, Draft, plugins
from spec_trainer.cli.commands.train import run_training
from spec_trainer.cli.quickstart.run import CPU_CONCURRENCY, QuickstartSize, held_out_prompts, prepare_files
from spec_trainer.cli.quickstart.tiny_arithmetic import bfloat16_products, one_thread
from spec_trainer.plan.resolve import resolve
from spec_trainer.training.wiring import create_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core import Engine
    from spec_core.records import SamplingParams
    from spec_trainer.cli.quickstart.run import QuickstartFiles
    from spec_trainer.measure.evaluation.workload import Prompts
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
    rows = [Row(draft, tuple(words), seed) for seed in options.seed for draft, *words in variants]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, max_tasks_per_child=1) as pool:
        pending = [pool.submit(_result, row, size, files, options.backend, options.keep) for row in rows]
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


def _result(
    row: Row, size: QuickstartSize, files: QuickstartFiles, backend: str, keep: Path | None
) -> dict[str, Any]:
    before = _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        run = _resolved(row, size, files, backend, keep or Path(folder) / "run")
        with bfloat16_products():  # as the quickstart trains
            summary = run_training(run)
        trained = _cpu_seconds()
        measured = _measured(run, size)
    result = {
        **vars(row),
        "held_out_loss": summary["eval_loss"],
        **measured,
        "training_cpu_s": trained - before,
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


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


def _measured(run: RunSpec, size: QuickstartSize) -> dict[str, float]:
    """Return the acceptance lengths of sampled and of greedy decoding over all prompts, and the speed-up."""
    prompts = held_out_prompts(run, size.num_prompts)
    found: dict[str, float] = {}
    with one_thread(), create_engine(run, run.target) as engine:
        engine.load_draft(run.directory.draft)
        for name, temperature in (("sampled", size.sampling.temperature), ("greedy", 0.0)):
            before = engine.acceptance()
            engine.generate(prompts, replace(size.sampling, temperature=temperature, seed=0))
            after = engine.acceptance()
            found[name] = 1 + (after.accepted - before.accepted) / (after.rounds - before.rounds)
        plain = _decoding_cpu_seconds(engine, prompts, replace(size.sampling, num_draft_tokens=0, seed=0))
        found["speedup"] = plain / _decoding_cpu_seconds(engine, prompts, replace(size.sampling, seed=0))
    return found


def _decoding_cpu_seconds(engine: Engine, prompts: Prompts, sampling: SamplingParams) -> float:
    before = time.process_time()
    for first in range(0, len(prompts), CPU_CONCURRENCY):
        engine.generate(prompts[first : first + CPU_CONCURRENCY], sampling)
    return time.process_time() - before


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
            **{key: statistics.fmean(row[key] for row in rows) for key in ("training_cpu_s", "speedup")},
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
    add("--keep", type=Path, metavar="FOLDER", help="where the run directory of the only row stays")
    options = parser.parse_args(arguments)
    if options.keep and len(options.variant) * len(options.seed) > 1:
        parser.error("--keep takes one variant and one seed")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
