"""Feature transport between two processes of this host: latency and bandwidth by size, and a soak.

    python benchmarks/transport.py [--sizes-mb 0.25 1 4 16 64 256] [--repeats 20]
    python benchmarks/transport.py --soak 10000

Prints one JSON document. ``send`` is one ``send`` with its ticket; ``round_trip`` ends when the receiver has taken
the sample and released it. ``copy`` is a bare copy of the same hidden states into memory that is warm, too, measured
in turn with the sends. ``_ms`` are medians, ``_best_ms`` the best of all: on a busy machine they lie far apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from spec_core.cpu.shared_memory_transport import SharedMemoryTransport
from spec_core.errors import PeerLost
from spec_core.records import FeatureSample, FeatureSchema

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SCHEMA = FeatureSchema(layers=(2, 16, 29, 32), hidden_size=4096, dtype="bfloat16")
"""Three auxiliary states and the last one, as wide as an 8-billion-parameter target's."""
TIMEOUT_S = 60.0
WARM_UP = 3
WINDOW_SAMPLES = 4
SOAK_TOKENS = 64


def sample_of(size_bytes: int) -> FeatureSample:
    num_tokens = max(1, round(size_bytes / (8 + SCHEMA.bytes_per_token())))
    hidden = torch.randn(SCHEMA.shape(num_tokens)).to(SCHEMA.torch_dtype())
    return FeatureSample(sample_id=0, input_ids=torch.arange(num_tokens), hidden_TNH=hidden)


def measure(sender_address: str, line: Connection, sizes: list[int], repeats: int) -> None:
    """The sender's process: for every size, copies and sends in turn."""
    torch.set_num_threads(1)
    with SharedMemoryTransport().connect(sender_address, SCHEMA, TIMEOUT_S) as sender:
        for size in sizes:
            sample = sample_of(size)
            target = torch.empty_like(sample.hidden_TNH)
            times: dict[str, list[float]] = {"copy": [], "send": [], "round_trip": []}
            for _ in range(WARM_UP + repeats):
                started = time.perf_counter()
                target.copy_(sample.hidden_TNH)
                times["copy"].append(time.perf_counter() - started)
                started = time.perf_counter()
                sender.send(sample, TIMEOUT_S).result(TIMEOUT_S)
                times["send"].append(time.perf_counter() - started)
                line.recv()
                times["round_trip"].append(time.perf_counter() - started)
            line.send(row(sample.num_bytes, times))


def row(num_bytes: int, times: dict[str, list[float]]) -> dict[str, float]:
    median = {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}
    best = {name: min(values[WARM_UP:]) for name, values in times.items()}
    return {
        "megabytes": num_bytes / 1e6,
        **{f"{name}_ms": 1e3 * value for name, value in median.items()},
        **{f"{name}_best_ms": 1e3 * value for name, value in best.items()},
        **{f"{name}_gb_per_s": num_bytes / 1e9 / value for name, value in median.items()},
        "send_fraction_of_copy": median["copy"] / median["send"],
        "send_fraction_of_copy_best": best["copy"] / best["send"],
    }


def bandwidth(sizes: list[int], repeats: int) -> list[dict[str, float]]:
    window = WINDOW_SAMPLES * max(sample_of(size).num_bytes for size in sizes)
    rows: list[dict[str, float]] = []
    with SharedMemoryTransport().listen(SCHEMA, window) as receiver:
        process, line = start(measure, receiver.address, sizes, repeats)
        for _ in sizes:
            for _ in range(WARM_UP + repeats):
                receiver.release(receiver.receive(TIMEOUT_S))
                line.send("released")
            rows.append(line.recv())
        finish(process)
    return rows


def stream(address: str, line: Connection, samples: int) -> None:
    """The sender's process of the soak; reports its memory at the start, in the middle and at the end."""
    torch.set_num_threads(1)
    sample = sample_of(SOAK_TOKENS * SCHEMA.bytes_per_token())
    with SharedMemoryTransport().connect(address, SCHEMA, TIMEOUT_S) as sender:
        for number in range(samples):
            if number in checkpoints(samples):
                line.send(memory())
            sender.send(sample, TIMEOUT_S)
        line.send(memory())


def soak(samples: int) -> dict[str, Any]:
    received: list[dict[str, int]] = []
    window = WINDOW_SAMPLES * sample_of(SOAK_TOKENS * SCHEMA.bytes_per_token()).num_bytes
    started = time.perf_counter()
    with SharedMemoryTransport().listen(SCHEMA, window) as receiver:
        process, line = start(stream, receiver.address, samples)
        for number in range(samples):
            if number in checkpoints(samples):
                received.append(memory())
            sample = receiver.receive(TIMEOUT_S)
            sample.hidden_TNH[:, 0, 0].sum()  # touches every page, as a trainer does
            receiver.release(sample)
        received.append(memory())
        with contextlib.suppress(PeerLost):
            receiver.receive(TIMEOUT_S)  # the sender closes, and nothing comes after the last sample
        sent = [line.recv() for _ in received]
        finish(process)
    seconds = time.perf_counter() - started
    return {
        "samples": samples,
        "seconds": seconds,
        "window_bytes": window,
        "sender": sent,
        "receiver": received,
    }


def checkpoints(samples: int) -> tuple[int, int]:
    """After a warm-up of a tenth, and half-way; the third look is at the end."""
    return samples // 10, samples // 2


def memory() -> dict[str, int]:
    """Bytes of this process's own memory and of the shared memory that it has touched; open descriptors."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return {
        "private_bytes": int(fields["RssAnon"].split()[0]) * 1024,
        "shared_bytes": int(fields["RssShmem"].split()[0]) * 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def start(function: Any, address: str, *args: Any) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(address, theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def finish(process: Any) -> None:
    process.join(TIMEOUT_S)
    if process.exitcode != 0:
        raise SystemExit(f"the sender ended with exit code {process.exitcode}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes-mb", type=float, nargs="+", default=[0.25, 1, 4, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--soak", type=int, metavar="SAMPLES")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {"torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    if arguments.soak:
        document["soak"] = soak(arguments.soak)
    else:
        document["by_size"] = bandwidth([round(size * 1e6) for size in arguments.sizes_mb], arguments.repeats)
    json.dump(document, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
