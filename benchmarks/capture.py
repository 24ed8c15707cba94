"""Measure an engine's capture throughput against its plain prefill of the same prompts.

    python benchmarks/capture.py --engine vllm --backend cuda --shape qwen3-8b --samples 48 --tokens 2048

Prints one JSON document. ``prefill`` runs every prompt and generates one token; ``capture`` runs every prompt and
hands the features that a draft needs to a receiver in another process, which takes and releases them as a trainer
does. ``share`` is capture's throughput over prefill's. Each is repeated, after a warm-up; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine, versions
from random_target import SHAPES, write_random_target

from spec_core import Backend, Draft, Engine, EngineContext, plugins
from spec_core.records import CaptureRequest, FeatureSchema, SamplingParams
from spec_core.validation import validate
from spec_kit.targets.target_reader import read_target
from spec_processes import collect_rarely
from spec_trainer.configuration import read_configuration

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

LIMIT_S = 600.0
MEMORY_FRACTION = 0.6
KEPT_TOKENS = 256


def main() -> int:
    """Measure what the command line asks for and print it; return the exit code."""
    collect_rarely()  # as an engine's process does
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--placement", default="colocated", choices=["colocated", "disaggregated"])
    parser.add_argument("--shape", default="toy", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--target", type=Path, help="a folder to use, or to write the random target to")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft", default="eagle3", help="whose features are captured")
    parser.add_argument("--only-capture", action="store_true", help="without the plain prefill")
    parser.add_argument(
        "--memory-fraction", type=float, help=f"where memory is limited; default {MEMORY_FRACTION}"
    )
    parser.add_argument("--keep", type=Path, help="write features of the first sample there (safetensors)")
    parser.add_argument("options", nargs="*", help="of the engine: batch_tokens=16384 …")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engine is closed
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_target(
            arguments.shape, arguments.target or Path(scratch) / "target", arguments.dtype
        )
        json.dump(measure(arguments, folder), sys.stdout, indent=2)
    print()
    return 0


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the document of one engine on the target in ``folder``."""
    target = read_target(folder)
    backend = load_backend(arguments.backend)
    engine_type = plugins.load_available(Engine, arguments.engine)
    options = read_configuration(None, {}, arguments.options)
    config = validate(engine_type.Config, {"name": arguments.engine, **options}, "engine")
    draft_type = plugins.load_available(Draft, arguments.draft)
    schema = draft_type(draft_type.Config(name=arguments.draft)).required_features(target)
    fraction = arguments.memory_fraction
    if fraction is None and backend.capabilities().memory_limit:
        fraction = MEMORY_FRACTION
    context = EngineContext(backend=backend, placement=arguments.placement, memory_fraction=fraction)
    with engine_type.create(config, target, context) as engine:
        seconds = timed_runs(arguments, engine, schema)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions("torch", "spec-trainer")
        | engine_type.probe().versions
        | backend.probe().versions,
        "engine": config.model_dump(mode="json"),
        "backend": arguments.backend,
        "placement": arguments.placement,
        "memory_fraction": fraction,
        "shape": arguments.shape if arguments.target is None else str(arguments.target.name),
        "draft": arguments.draft,
        "samples": arguments.samples,
        "tokens": arguments.tokens,
        "bytes_per_token": schema.bytes_per_token(),
        **_rates(seconds, arguments.samples * arguments.tokens),
    }


def timed_runs(
    arguments: argparse.Namespace, engine: Engine, schema: FeatureSchema
) -> dict[str, list[float]]:
    """Return the seconds of each run over the prompts, by what was run."""
    draw, vocab_size = random.Random(0), engine.target.vocab_size
    prompts = [
        [draw.randrange(vocab_size) for _ in range(arguments.tokens)] for _ in range(arguments.samples)
    ]
    seconds: dict[str, list[float]] = {}
    if not arguments.only_capture:
        seconds["prefill"] = repeated(lambda: prefill_once(engine, prompts), arguments.repeats)
    with receiving(arguments, schema) as receiver:
        seconds["capture"] = repeated(
            lambda: capture_once(engine, prompts, schema, receiver), arguments.repeats
        )
    return seconds


def _rates(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Return medians, and as ``share`` the speed of capture over that of plain prefill."""
    rate = {name: tokens / statistics.median(runs) for name, runs in seconds.items()}
    found: dict[str, Any] = {f"{name}_s": runs for name, runs in seconds.items()}
    found |= {f"{name}_tokens_per_s": value for name, value in rate.items()}
    return found | ({"share": rate["capture"] / rate["prefill"]} if "prefill" in rate else {})


def repeated(call: Any, repeats: int) -> list[float]:
    """Return the seconds of each run, after one run that warms up."""
    call()
    seconds: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def prefill_once(engine: Engine, prompts: list[list[int]]) -> None:
    """Run every prompt and generate one token each."""
    engine.generate(prompts, SamplingParams(max_new_tokens=1, stop_at_eos=False))


def capture_once(engine: Engine, prompts: list[list[int]], schema: FeatureSchema, receiver: Receiver) -> None:
    """Capture every prompt, and wait until the receiver has taken and released every sample."""
    requests = [
        CaptureRequest(request_id=index, input_ids=tuple(prompt), destinations=(receiver.address,))
        for index, prompt in enumerate(prompts)
    ]
    receiver.line.send(len(requests))
    engine.capture(requests, schema).result(LIMIT_S)
    receiver.line.recv()


@dataclass
class Receiver:
    """The receiving process, as this one sees it."""

    address: str
    line: Connection


@contextmanager
def receiving(arguments: argparse.Namespace, schema: FeatureSchema) -> Iterator[Receiver]:
    """Run the receiving process for the duration of the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(arguments, schema, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Receiver(ours.recv(), ours)
    finally:
        ours.close()
        process.join(LIMIT_S)


def receive(arguments: argparse.Namespace, schema: FeatureSchema, line: Connection) -> None:
    """Take and release as many samples as each message on ``line`` announces, until it is closed."""
    from safetensors.torch import save_file

    backend = load_backend(arguments.backend)
    backend.device(receivers_device(backend, arguments.placement))
    window = 2 * arguments.samples * arguments.tokens * (schema.bytes_per_token() + 8)
    with suppress(EOFError), backend.transport(arguments.placement).listen(schema, window) as features:
        line.send(features.address)
        while True:
            for _ in range(count := line.recv()):
                sample = features.receive(LIMIT_S)
                if arguments.keep is not None and sample.request_id == 0:
                    saved_TNH = sample.hidden_TNH[:KEPT_TOKENS].clone().cpu()
                    save_file({"hidden_TNH": saved_TNH}, arguments.keep)
                features.release(sample)
            line.send(count)


def receivers_device(backend: Backend, placement: str) -> int:
    """Return the receiver's device: the engine's (the first), or the next one if disaggregated and present."""
    return int(placement == "disaggregated" and backend.capabilities().num_devices > 1)


def load_backend(name: str) -> Backend:
    """Return the backend of that name with its default configuration."""
    plugin = plugins.load_available(Backend, name)
    return plugin(validate(plugin.Config, {"name": name}, "backend"))


if __name__ == "__main__":
    sys.exit(main())
