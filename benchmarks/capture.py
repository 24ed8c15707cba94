"""Capture throughput of an engine, against the same engine's plain prefill of the same prompts.

    python benchmarks/capture.py --engine vllm --backend cuda --shape qwen3-8b --samples 48 --tokens 2048

Prints one JSON document. ``prefill`` runs every prompt and generates one token; ``capture`` runs every prompt and
hands its features (three auxiliary states and the input of the final norm) to a receiver in another process, which
takes and releases them as a trainer does. ``share`` is capture's throughput over prefill's. Each is repeated, after
a warm-up; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine, versions
from random_target import SHAPES, write_random_target

from spec_core import Backend, Engine, plugins
from spec_core.config import validate
from spec_core.engine import Site
from spec_core.records import CaptureRequest, FeatureSchema, SamplingParams
from spec_core.target_reader import read_target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

LIMIT_S = 600.0
KEPT_TOKENS = 256


def main() -> int:
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
    parser.add_argument("--memory-fraction", type=float)
    parser.add_argument("--keep", type=Path, help="write features of the first sample there (safetensors)")
    parser.add_argument("options", nargs="*", help="of the engine: batch_tokens=16384 …")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_random_target(
            arguments.shape, arguments.target or Path(scratch) / "target", arguments.dtype
        )
        json.dump(measure(arguments, folder), sys.stdout, indent=2)
    print()
    return 0


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    target = read_target(folder)
    backend = load_backend(arguments.backend)
    engine_type = plugins.load_available(Engine, arguments.engine)
    options = {
        key: json.loads(value) for key, _, value in (word.partition("=") for word in arguments.options)
    }
    config = validate(engine_type.Config, {"name": arguments.engine, **options}, "engine")
    layers = (2, target.num_layers // 2, target.num_layers - 3, target.num_layers)
    schema = FeatureSchema(layers=layers, hidden_size=target.hidden_size, dtype=target.dtype)
    draw = random.Random(0)
    prompts = [
        [draw.randrange(target.vocab_size) for _ in range(arguments.tokens)] for _ in range(arguments.samples)
    ]
    site = Site(backend=backend, placement=arguments.placement, memory_fraction=arguments.memory_fraction)
    with engine_type.at(config, target, site) as engine:
        prefill = repeated(lambda: prefill_once(engine, prompts), arguments.repeats)
        with receiving(arguments, schema) as trainer:
            capture = repeated(lambda: capture_once(engine, prompts, schema, trainer), arguments.repeats)
    tokens = arguments.samples * arguments.tokens
    rate = {"prefill": tokens / statistics.median(prefill), "capture": tokens / statistics.median(capture)}
    return {
        "machine": machine(),
        "versions": versions("torch", "spec-trainer")
        | engine_type.probe().versions
        | backend.probe().versions,
        "engine": config.model_dump(mode="json"),
        "backend": arguments.backend,
        "placement": arguments.placement,
        "shape": arguments.shape if arguments.target is None else str(arguments.target.name),
        "samples": arguments.samples,
        "tokens": arguments.tokens,
        "bytes_per_token": schema.bytes_per_token(),
        "prefill_s": prefill,
        "capture_s": capture,
        "prefill_tokens_per_s": rate["prefill"],
        "capture_tokens_per_s": rate["capture"],
        "share": rate["capture"] / rate["prefill"],
    }


def repeated(call: Any, repeats: int) -> list[float]:
    """Seconds of each run after one that warms up."""
    call()
    seconds: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def prefill_once(engine: Engine, prompts: list[list[int]]) -> None:
    engine.generate(prompts, SamplingParams(max_new_tokens=1, stop_at_eos=False))


def capture_once(engine: Engine, prompts: list[list[int]], schema: FeatureSchema, trainer: Trainer) -> None:
    """Until the receiver has taken and released every sample, too."""
    requests = [
        CaptureRequest(sample_id=index, input_ids=tuple(prompt), destination=trainer.address)
        for index, prompt in enumerate(prompts)
    ]
    trainer.line.send(len(requests))
    engine.capture(requests, schema).result(LIMIT_S)
    trainer.line.recv()


@dataclass
class Trainer:
    """The receiving process, as far as this one talks to it."""

    address: str
    line: Connection


@contextmanager
def receiving(arguments: argparse.Namespace, schema: FeatureSchema) -> Iterator[Trainer]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(arguments, schema, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Trainer(ours.recv(), ours)
    finally:
        ours.close()
        process.join(LIMIT_S)


def receive(arguments: argparse.Namespace, schema: FeatureSchema, line: Connection) -> None:
    """The trainer's part, until the line is closed: takes as many samples as it is told of, releases each."""
    from safetensors.torch import save_file

    backend = load_backend(arguments.backend)
    backend.device(0)
    window = 2 * arguments.samples * arguments.tokens * (schema.bytes_per_token() + 8)
    with suppress(EOFError), backend.transport(arguments.placement).listen(schema, window) as features:
        line.send(features.address)
        while True:
            for _ in range(count := line.recv()):
                sample = features.receive(LIMIT_S)
                if arguments.keep is not None and sample.sample_id == 0:
                    kept_TNH = sample.hidden_TNH[:KEPT_TOKENS].clone().cpu()
                    save_file({"hidden_TNH": kept_TNH}, arguments.keep)
                features.release(sample)
            line.send(count)


def load_backend(name: str) -> Backend:
    plugin = plugins.load_available(Backend, name)
    return plugin(validate(plugin.Config, {"name": name}, "backend"))


if __name__ == "__main__":
    sys.exit(main())
