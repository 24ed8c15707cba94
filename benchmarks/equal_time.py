"""Train block drafts of a real target for the same time each, and measure what they reach; print one JSON document.

::

    python benchmarks/equal_time.py FOLDER --seconds 120 --bench-data QUESTIONS
    python benchmarks/equal_time.py FOLDER --seconds 240 --at-once 2 --bench-data QUESTIONS    # two share the device

FOLDER has ``target/`` and ``answers/``, as ``real_target.py`` leaves them. A short run of each draft says how long
its steps take. Then each draft is trained anew for as many steps as the time allows, and ``evaluate`` with engine hf,
which proposes all kinds, counts τ greedily and at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine, versions
from real_target import BENCHMARKS, EXAMPLES, Job, run_figures, run_jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

REDUCED = "draft.vocab_size=16384"
DRAFTS: dict[str, tuple[str, ...]] = {
    "dspark": (),
    "dflash": ("draft.block_size=8",),
    "dflash2": (),
    "lilicorr": (),
    "dspark reduced": (REDUCED,),
    "dflash reduced": ("draft.block_size=8", REDUCED),
    "dflash2 reduced": (REDUCED,),
}
"""Name of a row, whose first word is its draft -> options. LiLiCorr has no reduced vocabulary."""
RECIPE = EXAMPLES / "smollm2-135m-dflash2.yaml"
GUESSES = 7
"""Guesses of a round, as many as the smallest block makes."""
TIMED_STEPS = 40
"""Steps of the run that is timed; the second half of them counts, because the first ones compile kernels."""
FEWEST_STEPS = 10


def main(words: Sequence[str]) -> None:
    """Time, train and measure each row, and print the document; exit with 1 if a command has failed."""
    options = _options(words)
    results = options.folder / "results"
    results.mkdir(exist_ok=True)
    begun = time.monotonic()
    paces = _run(options, "pace", [_training(options, name, "pace", TIMED_STEPS) for name in options.drafts])
    steps = {name: _steps_within(options, name) for name, row in paces.items() if "failed" not in row}
    trained = _run(
        options, "equal", [_training(options, name, "equal", count) for name, count in steps.items()]
    )
    done = [name for name, row in trained.items() if "failed" not in row]
    measured = _run(options, "measure", [_measuring(options, name) for name in done])
    document = {
        "benchmark": "equal_time",
        "date": datetime.now(UTC).date().isoformat(),
        "command": [Path(__file__).name, *words],
        "machine": machine(),
        "device": options.device_name,
        "versions": versions("torch", "transformers", "spec-trainer"),
        "seconds": options.seconds,
        "at_once": options.at_once,
        "seed": options.seed,
        "elapsed_s": round(time.monotonic() - begun, 1),
        "rows": {name: {**trained.get(name, row), **measured.get(name, {})} for name, row in paces.items()},
    }
    print(json.dumps(document, indent=1))
    sys.exit(len(done) < len(paces) or any("failed" in row for row in measured.values()))


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the steps of each draft")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument(
        "--bench-data", type=Path, required=True, help="folder with the benchmarks' questions"
    )
    parser.add_argument("--rows", type=int, default=10, help="questions of each benchmark")
    parser.add_argument("--new-tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--devices", nargs="+", default=["0"])
    parser.add_argument("--device-name", default="")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share a device")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="longest time of one command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", nargs="*", default=[], help="section.key=value words for every run")
    return parser.parse_args(words)


def _run(options: argparse.Namespace, stage: str, jobs: Sequence[Job]) -> dict[str, Any]:
    options.stage = stage
    return run_jobs(jobs, options, options.folder / "results") if jobs else {}


def _output(options: argparse.Namespace, name: str, stage: str) -> Path:
    return options.folder / "runs" / f"{stage}-{name.replace(' ', '-')}"


def _training(options: argparse.Namespace, name: str, stage: str, steps: int) -> Job:
    output = _output(options, name, stage)
    own = [
        f"target={options.folder / 'target'}", f"data.path={options.folder / 'answers'}", "data.eval_path=null",
        "data.eval_samples=0", "train.eval_every=0", f"output={output}", f"backend.name={options.backend}",
        "engine.name=hf", f"engine.dtype={options.dtype}", f"train.dtype={options.dtype}", f"seed={options.seed}",
        f"train.steps={steps}", f"train.save_every={steps}", f"train.warmup_steps={max(1, steps // 10)}",
    ]  # fmt: skip
    chosen = [f"draft.name={name.split()[0]}", *DRAFTS[name]]
    return Job(
        name=name,
        words=["train", "--config", f"{RECIPE}", *chosen, *own, *options.words],
        figures=lambda _: run_figures(output),
    )


def _steps_within(options: argparse.Namespace, name: str) -> int:
    metrics = _output(options, name, "pace") / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()][TIMED_STEPS // 2 :]
    pace_s = statistics.median(record["time_data_s"] + record["time_step_s"] for record in records)
    return max(FEWEST_STEPS, int(options.seconds / pace_s))


def _measuring(options: argparse.Namespace, name: str) -> Job:
    benchmarks = ",".join(f"{benchmark}:{options.rows}" for benchmark in BENCHMARKS)
    return Job(
        name=name,
        words=[
            "evaluate", "--json", "--target", f"{options.folder / 'target'}",
            "--draft-model", f"{_output(options, name, 'equal') / 'draft'}", "--bench", benchmarks,
            "--bench-data", f"{options.bench_data}", "--engine", "hf", "--backend", options.backend,
            "--max-new-tokens", f"{options.new_tokens}", "--num-draft-tokens", f"{GUESSES}",
            f"engine.dtype={options.dtype}",
        ],
        figures=_tau,
    )  # fmt: skip


def _tau(output: str) -> dict[str, Any]:
    found = json.loads(output)
    kept = ("acceptance_length", "acceptance_per_position", "rounds", "generated_tokens")
    return {f"measured_{way}": {name: found[way][name] for name in kept} for way in ("greedy", "sampled")}


if __name__ == "__main__":
    main(sys.argv[1:])
