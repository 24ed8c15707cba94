"""Train drafts for a real target on its own answers, and measure them in an engine; write one JSON document a stage.

::

    python benchmarks/real_target.py answers FOLDER        # the target's answers to FOLDER/prompts.jsonl
    python benchmarks/real_target.py sweep FOLDER          # short runs with other settings
    python benchmarks/real_target.py train FOLDER          # each recipe examples/smollm2-135m-*.yaml
    python benchmarks/real_target.py evaluate FOLDER --bench-data QUESTIONS

FOLDER has ``target/``, ``prompts.jsonl`` and ``held_out.jsonl``. Each stage is a list of commands; ``--devices 0 1``
says on which GPUs they run, ``--at-once`` how many of them share one. A command that has ended is not run again; one
that fails is named in the document, with the last lines of its log.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine, versions
from real_run import SPEC_TRAINER, steady_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TEMPERATURES = ("0", "0.7", "1")
DRAFTS = ("eagle3", "dspark", "peagle", "dflash", "dflash2")
BENCHMARKS = ("mt_bench", "gsm8k", "humaneval", "alpaca")
TAIL_LINES = 30
SHORT = 300
"""Steps of a run of ``sweep``, unless the run says otherwise."""
ADAMW, MUON = ("optimizer.name=adamw",), ("optimizer.name=muon", "optimizer.matrix_rate=2.857")
SWEEP: dict[str, tuple[str, ...]] = {
    "eagle3 adamw 1e-3": ("train.lr=1e-3", *ADAMW),
    "dspark adamw 1e-3, 512 anchors": ("train.lr=1e-3", *ADAMW, "draft.num_anchors=512"),
    "dspark adamw 1e-3, 128 anchors, 750 steps": (
        "train.lr=1e-3", *ADAMW, "draft.num_anchors=128", "train.steps=750",
    ),
    "eagle3 adamw 2e-3": ("train.lr=2e-3", *ADAMW),
    "eagle3 adamw 4e-3": ("train.lr=4e-3", *ADAMW),
    "dspark adamw 2e-3, 128 anchors": ("train.lr=2e-3", *ADAMW, "draft.num_anchors=128"),
    "eagle3 muon 1e-3": ("train.lr=1e-3", *MUON),
    "eagle3 muon 2e-3": ("train.lr=2e-3", *MUON),
    "dspark muon 1e-3, 128 anchors": ("train.lr=1e-3", *MUON, "draft.num_anchors=128"),
}  # fmt: skip
"""Name of a short run, whose first word is its draft -> what it changes in the draft's recipe."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command of ``spec-trainer`` and the reader of its figures."""

    name: str
    words: Sequence[str]
    figures: Callable[[str], dict[str, Any]]
    """Takes the command's standard output."""


def main(words: Sequence[str]) -> None:
    """Run a stage, write FOLDER/results/STAGE.json, and print it; exit with 1 if a command has failed."""
    options = _options(words)
    jobs = STAGES[options.stage](options)
    if options.only:
        jobs = [job for job in jobs if job.name in options.only]
    folder = options.folder / "results"
    folder.mkdir(exist_ok=True)
    started = time.monotonic()
    rows = run_jobs(jobs, options, folder)
    document = {
        "benchmark": f"real_target {options.stage}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "device": options.device_name,
        "devices": len(options.devices),
        "jobs_on_a_device_at_once": options.at_once,
        "versions": versions("torch", "transformers", "vllm", "spec-trainer"),
        "elapsed_s": round(time.monotonic() - started, 1),
        "rows": rows,
    }
    (folder / f"{options.stage}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({name: _short(row) for name, row in rows.items()}, indent=1))
    sys.exit(any("failed" in row for row in rows.values()))


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--devices", nargs="+", default=["0"])
    parser.add_argument("--at-once", type=int, default=1, help="commands that share a device")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="longest time of one command")
    parser.add_argument("--device-name", default="")
    parser.add_argument("--bench-data", type=Path, help="folder with the questions of the benchmarks")
    parser.add_argument("--rows", type=int, default=80, help="questions of each benchmark")
    parser.add_argument("--new-tokens", type=int, default=512, help="of an answer; benchmarks: half of it")
    parser.add_argument("--drafts", nargs="+", default=DRAFTS)
    parser.add_argument("--concurrency", default="", help="numbers of answers at once for evaluate")
    parser.add_argument("--only", nargs="+", help="names of the commands to run")
    parser.add_argument("--words", nargs="*", default=[], help="section.key=value words for every command")
    return parser.parse_args(words)


def _answers(options: argparse.Namespace) -> list[Job]:
    folder, engine = options.folder, ["--engine", options.engine, "--backend", options.backend]
    (folder / "answers").mkdir(exist_ok=True)
    asked = {"held-out": (folder / "held_out.jsonl", folder / "held-out.jsonl", "0")}
    for temperature in TEMPERATURES:
        output = folder / "answers" / f"{temperature}.jsonl"
        asked[f"answers at {temperature}"] = (folder / "prompts.jsonl", output, temperature)
    return [
        Job(
            name=name,
            words=[
                "regenerate", "--json", "--target", f"{folder / 'target'}", "--data", f"{data}",
                "--output", f"{output}", "--max-new-tokens", f"{options.new_tokens}", "--temperature", temperature,
                *engine, *options.words,
            ],
            figures=json.loads,
        )
        for name, (data, output, temperature) in asked.items()
    ]  # fmt: skip


def _training(options: argparse.Namespace, name: str, draft: str, *words: str) -> Job:
    folder = options.folder
    output = folder / "runs" / name.replace(" ", "-").replace(",", "").replace("'", "")
    own = [
        f"target={folder / 'target'}", f"data.path={folder / 'answers'}",
        f"data.eval_path={folder / 'held-out.jsonl'}", f"output={output}",
        f"backend.name={options.backend}", f"engine.name={options.engine}",
    ]  # fmt: skip
    recipe = EXAMPLES / f"smollm2-135m-{draft}.yaml"
    return Job(
        name=name,
        words=["train", "--config", f"{recipe}", *own, *words, *options.words],
        figures=lambda _: run_figures(output),
    )


def _sweep(options: argparse.Namespace) -> list[Job]:
    fixed = (f"train.steps={SHORT}", "train.warmup_steps=50")
    return [
        _training(options, name, name.split()[0], *fixed, *words)
        for name, words in SWEEP.items()
        if name.split()[0] in options.drafts
    ]


def _train(options: argparse.Namespace) -> list[Job]:
    return [_training(options, draft, draft) for draft in options.drafts]


def run_figures(output: Path) -> dict[str, Any]:
    """Return a run's speed, its summary, and its held-out figures by trained tokens."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((output / "summary.json").read_text())
    tokens, held_out = 0, []
    for record in records:
        tokens += record["tokens"]
        found = {key: value for key, value in record.items() if key.startswith("eval_")}
        if found:
            held_out.append({"step": record["step"], "tokens": tokens, **found})
    warm_up = min(20, len(records) // 4 + 1)
    return {
        "summary": summary,
        "tokens": tokens,
        "speed": steady_state(records, warm_up, 0),
        "losses": [record["loss"] for record in records[:: max(1, len(records) // 50)]],
        "held_out": held_out,
    }


def _evaluate(options: argparse.Namespace) -> list[Job]:
    folder = options.folder
    benchmarks = ",".join(f"{name}:{options.rows}" for name in BENCHMARKS)
    load = ["--concurrency", options.concurrency] if options.concurrency else []
    return [
        Job(
            name=draft,
            words=[
                "evaluate", "--json", "--target", f"{folder / 'target'}",
                "--draft-model", f"{folder / 'runs' / draft / 'draft'}", "--bench", benchmarks,
                "--bench-data", f"{options.bench_data}", "--engine", options.engine, "--backend", options.backend,
                "--max-new-tokens", f"{options.new_tokens // 2}", *load, *options.words,
            ],
            figures=json.loads,
        )
        for draft in options.drafts
    ]  # fmt: skip


STAGES = {"answers": _answers, "sweep": _sweep, "train": _train, "evaluate": _evaluate}


def run_jobs(jobs: Sequence[Job], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the jobs, each on the next free place of a device; return their rows in order."""
    places: queue.Queue[str] = queue.Queue()
    for _ in range(options.at_once):
        for device in options.devices:
            places.put(device)

    def run_one(job: Job) -> dict[str, Any]:
        device = places.get()
        try:
            return _row(job, device, options, folder)
        finally:
            places.put(device)

    with ThreadPoolExecutor(places.qsize()) as pool:
        return dict(zip([job.name for job in jobs], pool.map(run_one, jobs), strict=True))


def _row(job: Job, device: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a job on ``device``, or read the row of an earlier command."""
    stem = folder / f"{options.stage}-{job.name.replace(' ', '-')}"
    kept = stem.with_name(f"{stem.name}.row.json")
    if kept.exists():
        return json.loads(kept.read_text())
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": device} if options.backend == "cuda" else {})
    log, started = stem.with_name(f"{stem.name}.log"), time.monotonic()
    print(f"{job.name} begins on {device}", file=sys.stderr, flush=True)
    with log.open("w") as stderr:
        try:
            done = subprocess.run(
                [*SPEC_TRAINER, *job.words], stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
                timeout=options.limit_s, check=False,
            )  # fmt: skip
            output, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired:
            output, code = "", -1
    seconds = round(time.monotonic() - started, 1)
    print(f"{job.name} ended with {code} after {seconds} s", file=sys.stderr, flush=True)
    row: dict[str, Any] = {"command": ["spec-trainer", *job.words], "elapsed_s": seconds}
    if code:
        return {**row, "failed": code, "log": log.read_text(errors="replace").splitlines()[-TAIL_LINES:]}
    row |= job.figures(output)
    kept.write_text(json.dumps(row))
    return row


def _short(row: dict[str, Any]) -> dict[str, Any]:
    if "failed" in row:
        return {"failed": row["failed"], "log": row["log"][-8:]}
    names = (
        "elapsed_s",
        "generated_tokens",
        "tokens_per_s",
        "acceptance_length",
        "acceptance_per_position",
        "tokens",
    )
    last = row["held_out"][-1] if row.get("held_out") else {}
    speed = {"trained_tokens_per_s": row["speed"]["tokens_per_s"]} if "speed" in row else {}
    return {name: row[name] for name in names if name in row} | speed | last


if __name__ == "__main__":
    main(sys.argv[1:])
