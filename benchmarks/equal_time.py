"""Train block drafts of a real target for the same time each, and measure what they reach; print one JSON document.

::

    python benchmarks/equal_time.py FOLDER --seconds 120 --bench-data QUESTIONS
    python benchmarks/equal_time.py FOLDER --seconds 240 --at-once 2 --bench-data QUESTIONS    # two share the device
    python benchmarks/equal_time.py FOLDER --seconds 120 --further 120 --bench-data QUESTIONS  # Draft-OPD, too

FOLDER has ``target/`` and ``answers/``, as ``real_target.py`` leaves them. A short run of each draft says how long
its steps take. Then each draft is trained anew for as many steps as the time allows, and ``evaluate`` with engine hf,
which proposes all kinds, counts τ greedily and at temperature 1. With ``--further`` each draft of a whole vocabulary
goes on from there in two runs: one on the same answers, and one on the draft's own rounds with Draft-OPD, whose
time includes the decoding.
"""

from __future__ import annotations

import argparse
import json
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
FURTHER: dict[str, tuple[str, ...]] = {
    "on": (),
    "opd": (
        "decode.on_policy=true", "draft.opd=true", "decode.every=10", "train.push_every=10", "decode.prompts=512",
        "decode.max_new_tokens=192", "decode.temperature=0",
    ),
}  # fmt: skip
"""Last word of the name of a run that goes on from a trained draft -> options."""
RECIPE = EXAMPLES / "smollm2-135m-dflash2.yaml"
GUESSES = 7
"""Guesses of a round, as many as the smallest block makes."""
TIMED_STEPS = 40
"""Steps of the run that is timed; the second half of them counts, because the first ones compile kernels. Both halves
are whole cycles of ``FURTHER``."""
FEWEST_STEPS = 10


def main(words: Sequence[str]) -> None:
    """Time, train and measure each row, and print the document; exit with 1 if a command has failed."""
    options = _options(words)
    results = options.folder / "results"
    results.mkdir(exist_ok=True)
    begun = time.monotonic()
    rows = _train_and_measure(options, options.drafts, options.seconds)
    whole = [name for name in options.drafts if "failed" not in rows[name] and "reduced" not in name]
    if options.further:
        names = [f"{name} {way}" for name in whole for way in FURTHER]
        rows |= _train_and_measure(options, names, options.further)
    document = {
        "benchmark": "equal_time",
        "date": datetime.now(UTC).date().isoformat(),
        "command": [Path(__file__).name, *words],
        "machine": machine(),
        "device": options.device_name,
        "versions": versions("torch", "transformers", "spec-trainer"),
        "seconds": options.seconds,
        "further_seconds": options.further,
        "at_once": options.at_once,
        "seed": options.seed,
        "elapsed_s": round(time.monotonic() - begun, 1),
        "rows": rows,
    }
    print(json.dumps(document, indent=1))
    sys.exit(any("failed" in row for row in rows.values()))


def _train_and_measure(
    options: argparse.Namespace, names: Sequence[str], seconds: float
) -> dict[str, dict[str, Any]]:
    """Train each row for so many seconds, and add what ``evaluate`` counts."""
    paces = _run(options, "pace", [_training(options, name, "pace", TIMED_STEPS) for name in names])
    steps = {
        name: _steps_within(options, name, seconds) for name, row in paces.items() if "failed" not in row
    }
    trained = _run(
        options, "equal", [_training(options, name, "equal", count) for name, count in steps.items()]
    )
    done = [name for name, row in trained.items() if "failed" not in row]
    measured = _run(options, "measure", [_measuring(options, name) for name in done])
    return {name: {**trained.get(name, row), **measured.get(name, {})} for name, row in paces.items()}


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the steps of each draft")
    parser.add_argument("--further", type=float, default=0.0, help="seconds of the runs that go on")
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
    begun, _, way = name.rpartition(" ")
    if way in FURTHER:
        start = _output(options, begun, "equal") / "draft"
        chosen = [*DRAFTS[begun], *FURTHER[way], f"draft.init_from={start}"]
    else:
        chosen = [*DRAFTS[name]]
    return Job(
        name=name,
        words=[
            "train",
            "--config",
            f"{RECIPE}",
            f"draft.name={name.split()[0]}",
            *chosen,
            *own,
            *options.words,
        ],
        figures=lambda _: run_figures(output),
    )


def _steps_within(options: argparse.Namespace, name: str, seconds: float) -> int:
    """Return the steps that fit into the seconds, at the pace of the timed run with all that a step waits for."""
    metrics = _output(options, name, "pace") / "metrics.jsonl"
    since_start_s = [json.loads(line)["time_s"] for line in metrics.read_text().splitlines()]
    timed = len(since_start_s) // 2
    pace_s = (since_start_s[-1] - since_start_s[timed - 1]) / (len(since_start_s) - timed)
    return max(FEWEST_STEPS, int(seconds / pace_s))


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
