"""Feature transport between two processes of this host: latency and bandwidth by size, and a soak.

    python benchmarks/transport.py [--backend cpu|cuda] [--sizes-mb 0.25 1 4 16 64 256] [--repeats 20]
    python benchmarks/transport.py [--backend cpu|cuda] --soak 10000

Prints one JSON document. The transport is the backend's for colocated processes, samples lie on its device.

``send``: how long one ``send`` with its ticket keeps the sender's thread, the engine's stall. ``round_trip`` ends
when the receiver has taken the sample and released it. ``receive``: how long taking and releasing a sample that is
already there keeps the receiver's thread. Each also as ``_device``: until the device is through with it, too.
``copy`` is a bare copy of the same hidden states into memory that is warm, measured in turn with the sends, until the
device is through. ``_ms`` are medians, ``_best_ms`` the best of all: on a busy machine they lie far apart.
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

from spec_core import Backend, plugins
from spec_core.errors import PeerLost
from spec_core.records import FeatureSample, FeatureSchema

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

SCHEMA = FeatureSchema(layers=(2, 16, 29, 32), hidden_size=4096, dtype="bfloat16")
"""Three auxiliary states and the last one, as wide as an 8-billion-parameter target's."""
TIMEOUT_S = 60.0
WARM_UP = 3
WINDOW_SAMPLES = 4
SOAK_TOKENS = 64


class Place:
    """A backend's device and transport in this process."""

    def __init__(self, backend: str) -> None:
        plugin = plugins.load(Backend, backend)
        self.backend = plugin(plugin.Config(name=backend))
        self.device = self.backend.device(0)
        self.transport = self.backend.transport("colocated")

    def sample(self, size_bytes: int) -> FeatureSample:
        num_tokens = max(1, round(size_bytes / (8 + SCHEMA.bytes_per_token())))
        hidden = torch.randn(SCHEMA.shape(num_tokens), device=self.device).to(SCHEMA.torch_dtype())
        ids = torch.arange(num_tokens, device=self.device)
        return FeatureSample(sample_id=0, input_ids=ids, hidden_TNH=hidden)

    def wait(self) -> None:
        """For the device, if there is one."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def time(self, times: dict[str, list[float]], name: str, call: Callable[[], object]) -> None:
        """Appends what ``call`` takes, and as NAME_device what it takes until the device is through."""
        self.wait()
        started = time.perf_counter()
        call()
        times.setdefault(name, []).append(time.perf_counter() - started)
        self.wait()
        times.setdefault(f"{name}_device", []).append(time.perf_counter() - started)


def measure(address: str, line: Connection, backend: str, sizes: list[int], repeats: int) -> None:
    """The sender's process: for every size, copies and sends in turn."""
    torch.set_num_threads(1)
    place = Place(backend)
    with place.transport.connect(address, SCHEMA, TIMEOUT_S) as sender:
        for size in sizes:
            sample = place.sample(size)
            target = torch.empty_like(sample.hidden_TNH)
            times: dict[str, list[float]] = {}
            for _ in range(WARM_UP + repeats):
                place.time(times, "copy", lambda: target.copy_(sample.hidden_TNH))  # noqa: B023
                place.time(times, "send", lambda: sender.send(sample, TIMEOUT_S).result(TIMEOUT_S))  # noqa: B023
                line.send("sent")
                times.setdefault("receive", []).append(line.recv())
                times.setdefault("receive_device", []).append(line.recv())
                started = time.perf_counter()
                sender.send(sample, TIMEOUT_S).result(TIMEOUT_S)
                line.recv()
                times.setdefault("round_trip", []).append(time.perf_counter() - started)
            times["copy"] = times.pop("copy_device")
            line.send(row(sample.num_bytes, times))


def row(num_bytes: int, times: dict[str, list[float]]) -> dict[str, float]:
    median = {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}
    best = {name: min(values[WARM_UP:]) for name, values in times.items()}
    return {
        "megabytes": num_bytes / 1e6,
        **{f"{name}_ms": 1e3 * value for name, value in median.items()},
        **{f"{name}_best_ms": 1e3 * value for name, value in best.items()},
        **{
            f"{name}_gb_per_s": num_bytes / 1e9 / median[name]
            for name in ("copy", "send_device", "round_trip")
        },
        "send_fraction_of_copy": median["copy"] / median["send_device"],
        "send_fraction_of_copy_best": best["copy"] / best["send_device"],
    }


def bandwidth(backend: str, sizes: list[int], repeats: int) -> list[dict[str, float]]:
    place = Place(backend)
    window = WINDOW_SAMPLES * max(place.sample(size).num_bytes for size in sizes)
    rows: list[dict[str, float]] = []
    with place.transport.listen(SCHEMA, window) as receiver:
        process, line = start(measure, receiver.address, backend, sizes, repeats)

        def take() -> None:
            receiver.release(receiver.receive(TIMEOUT_S))

        for _ in sizes:
            for _ in range(WARM_UP + repeats):
                line.recv()
                times: dict[str, list[float]] = {}
                place.time(times, "receive", take)
                line.send(times["receive"][0])
                line.send(times["receive_device"][0])
                take()
                line.send("released")
            rows.append(line.recv())
        finish(process)
    return rows


def stream(address: str, line: Connection, backend: str, samples: int) -> None:
    """The sender's process of the soak; reports its memory at the start, in the middle and at the end."""
    torch.set_num_threads(1)
    place = Place(backend)
    sample = place.sample(SOAK_TOKENS * SCHEMA.bytes_per_token())
    with place.transport.connect(address, SCHEMA, TIMEOUT_S) as sender:
        for number in range(samples):
            if number in checkpoints(samples):
                line.send(memory(place))
            sender.send(sample, TIMEOUT_S)
        line.send(memory(place))


def soak(backend: str, samples: int) -> dict[str, Any]:
    place = Place(backend)
    received: list[dict[str, int]] = []
    window = WINDOW_SAMPLES * place.sample(SOAK_TOKENS * SCHEMA.bytes_per_token()).num_bytes
    started = time.perf_counter()
    with place.transport.listen(SCHEMA, window) as receiver:
        process, line = start(stream, receiver.address, backend, samples)
        for number in range(samples):
            if number in checkpoints(samples):
                received.append(memory(place))
            sample = receiver.receive(TIMEOUT_S)
            sample.hidden_TNH[:, 0, 0].sum()  # touches every page, as a trainer does
            receiver.release(sample)
        received.append(memory(place))
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


def memory(place: Place) -> dict[str, int]:
    """Bytes of this process's own memory and of the shared memory that it has touched; open descriptors; on a device,
    the bytes that all processes together have of it."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    found = {
        "private_bytes": int(fields["RssAnon"].split()[0]) * 1024,
        "shared_bytes": int(fields["RssShmem"].split()[0]) * 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    if place.device.type != "cpu":
        free, total = torch.get_device_module(place.device).mem_get_info(place.device)
        found["device_bytes"] = total - free
    return found


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
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--sizes-mb", type=float, nargs="+", default=[0.25, 1, 4, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--soak", type=int, metavar="SAMPLES")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {"torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    document |= {"backend": arguments.backend, "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ}
    sizes = [round(size * 1e6) for size in arguments.sizes_mb]
    if arguments.soak:
        document["soak"] = soak(arguments.backend, arguments.soak)
    else:
        document["by_size"] = bandwidth(arguments.backend, sizes, arguments.repeats)
    json.dump(document, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
