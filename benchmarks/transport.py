"""Measure the feature transport: latency and bandwidth by size, and a soak.

An engine's and a trainer's process are started as a run starts them.

    python benchmarks/transport.py                                           # a minute on the CPU
    python benchmarks/transport.py --backend cuda --repeats 200 --soak 2000
    python benchmarks/transport.py --backend cuda --repeats 200 mps=never      # options of the backend
    python benchmarks/transport.py --backend cuda --placement disaggregated  # two GPUs

Prints one JSON document. Samples lie on the backend's device.

``send``: how long one ``send`` keeps the engine's thread, its stall. ``round_trip`` ends when the trainer has taken
the sample and released it. ``receive``: how long taking and releasing a sample that is already there keeps the
trainer's thread. Each also as ``_device``: until the device is through with it, too. ``copy`` is a bare copy of the
same hidden states into memory that is warm, measured in turn with the sends, until the device is through. ``_ms`` are
medians, ``_best_ms`` the best of all: on a busy machine they lie far apart.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from measure import device_name, machine, versions

from spec_core import Backend, plugins
from spec_core.errors import PeerLost
from spec_core.records import FeatureSample, FeatureSchema
from spec_core.validation import validate
from spec_trainer.configuration import read_configuration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

SCHEMA = FeatureSchema(layers=(2, 16, 29, 32), hidden_size=4096, dtype="bfloat16")
"""Three auxiliary states and the last one, as wide as an 8-billion-parameter target's."""
TIMEOUT_S = 60.0
WARM_UP = 3
WINDOW_SAMPLES = 4
SOAK_TOKENS = 64
SHARE = 0.5
"""Share of the device for either process, which is a run's default."""


@dataclass(frozen=True)
class Setup:
    """Settings that both processes receive."""

    backend: str
    options: tuple[str, ...]
    placement: str
    sizes: tuple[int, ...]
    """Sizes of the samples in bytes."""
    repeats: int
    soak: int
    """Samples of the soak; 0: no soak."""

    def load(self) -> Backend:
        """Return the backend with its options."""
        plugin = plugins.load_available(Backend, self.backend)
        config = {"name": self.backend, **read_configuration(None, {}, self.options)}
        return plugin(validate(plugin.Config, config, "backend"))


class Place:
    """A backend's device and transport in this process."""

    def __init__(self, setup: Setup) -> None:
        """Take the backend's first visible device."""
        torch.set_num_threads(1)
        backend = setup.load()
        self.device = backend.device(0)
        self.transport = backend.transport(setup.placement)

    def sample(self, size_bytes: int) -> FeatureSample:
        """Return a random sample of about that many bytes on the device."""
        num_tokens = max(1, round(size_bytes / (8 + SCHEMA.bytes_per_token())))
        hidden = torch.randn(SCHEMA.shape(num_tokens), device=self.device).to(SCHEMA.torch_dtype())
        ids = torch.arange(num_tokens, device=self.device)
        return FeatureSample(request_id=0, input_ids=ids, hidden_TNH=hidden)

    def wait(self) -> None:
        """Wait for the device, if there is one."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def time(self, times: dict[str, list[float]], name: str, call: Callable[[], object]) -> None:
        """Append the time of ``call``, and as NAME_device the time until the device is done."""
        self.wait()
        started = time.perf_counter()
        call()
        times.setdefault(name, []).append(time.perf_counter() - started)
        self.wait()
        times.setdefault(f"{name}_device", []).append(time.perf_counter() - started)

    def memory(self) -> dict[str, int]:
        """Return this process's private bytes, touched shared bytes and open descriptors.

        On a device, also the bytes that all processes together have of it.
        """
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        found = {
            "private_bytes": int(fields["RssAnon"].split()[0]) * 1024,
            "shared_bytes": int(fields["RssShmem"].split()[0]) * 1024,
            "descriptors": len(os.listdir("/proc/self/fd")),
        }
        if self.device.type != "cpu":
            free, total = torch.get_device_module(self.device).mem_get_info(self.device)
            found["device_bytes"] = total - free
        return found


def engine(setup: Setup, trainer: Connection, results: Connection) -> None:
    """Run the sender's process."""
    place = Place(setup)
    send_sizes(setup, place, trainer, results)
    if setup.soak:
        send_soak(setup, place, trainer, results)


def trainer(setup: Setup, engine: Connection, results: Connection) -> None:
    """Run the receiver's process."""
    place = Place(setup)
    take_sizes(setup, place, engine, results)
    if setup.soak:
        take_soak(setup, place, engine, results)


def send_sizes(setup: Setup, place: Place, trainer: Connection, results: Connection) -> None:
    """Copy and send in turn, for every size, and report the times."""
    with place.transport.connect(trainer.recv(), SCHEMA, TIMEOUT_S) as sender:
        for size in setup.sizes:
            sample = place.sample(size)
            target = torch.empty_like(sample.hidden_TNH)
            times: dict[str, list[float]] = {}
            for _ in range(WARM_UP + setup.repeats):
                place.time(times, "copy", lambda: target.copy_(sample.hidden_TNH))  # noqa: B023
                place.time(times, "send", lambda: sender.send(sample, TIMEOUT_S))  # noqa: B023
                sender.flush(TIMEOUT_S)
                trainer.send("sent")
                trainer.recv()
                started = time.perf_counter()
                sender.send(sample, TIMEOUT_S)
                trainer.recv()
                times.setdefault("round_trip", []).append(time.perf_counter() - started)
            times["copy"] = times.pop("copy_device")
            results.send((sample.num_bytes, times))


def take_sizes(setup: Setup, place: Place, engine: Connection, results: Connection) -> None:
    """Take and release what ``send_sizes`` sends, and report the times."""
    window = WINDOW_SAMPLES * max(place.sample(size).num_bytes for size in setup.sizes)
    results.send(device_name(place.device))
    with place.transport.listen(SCHEMA, window) as receiver:
        engine.send(receiver.address)

        def take() -> None:
            receiver.release(receiver.receive(TIMEOUT_S))

        for _ in setup.sizes:
            times: dict[str, list[float]] = {}
            for _ in range(WARM_UP + setup.repeats):
                engine.recv()
                place.time(times, "receive", take)
                engine.send("taken")
                take()
                engine.send("released")
            results.send(times)


def send_soak(setup: Setup, place: Place, trainer: Connection, results: Connection) -> None:
    """Send many small samples and report this process's memory on the way."""
    sample = place.sample(SOAK_TOKENS * SCHEMA.bytes_per_token())
    found: list[dict[str, int]] = []
    with place.transport.connect(trainer.recv(), SCHEMA, TIMEOUT_S) as sender:
        for number in range(setup.soak):
            if number in checkpoints(setup.soak):
                found.append(place.memory())
            sender.send(sample, TIMEOUT_S)
        sender.flush(TIMEOUT_S)
        found.append(place.memory())
        results.send(found)
        trainer.recv()


def take_soak(setup: Setup, place: Place, engine: Connection, results: Connection) -> None:
    """Take what ``send_soak`` sends and report this process's memory on the way."""
    found: list[dict[str, int]] = []
    window = WINDOW_SAMPLES * place.sample(SOAK_TOKENS * SCHEMA.bytes_per_token()).num_bytes
    started = time.perf_counter()
    with place.transport.listen(SCHEMA, window) as receiver:
        engine.send(receiver.address)
        for number in range(setup.soak):
            if number in checkpoints(setup.soak):
                found.append(place.memory())
            sample = receiver.receive(TIMEOUT_S)
            sample.hidden_TNH[:, 0, 0].sum()  # touches every page, as a trainer does
            receiver.release(sample)
        found.append(place.memory())
        seconds = time.perf_counter() - started
        engine.send("measured")
        with contextlib.suppress(PeerLost):
            receiver.receive(TIMEOUT_S)  # the sender closes, and nothing comes after the last sample
    results.send({"samples": setup.soak, "seconds": seconds, "window_bytes": window, "receiver": found})


def checkpoints(samples: int) -> tuple[int, int]:
    """Return when to look at memory: after a warm-up of a tenth, and half-way; the third look is at the end."""
    return samples // 10, samples // 2


def measured(setup: Setup) -> dict[str, Any]:
    """Return the figures of all sizes and of the soak."""
    found: dict[str, Any]
    with running(setup) as (engine, trainer):
        found = {"device": receive(trainer)}
        found["by_size"] = [row(*receive(engine), receive(trainer)) for _ in setup.sizes]
        if setup.soak:
            found["soak"] = {**receive(trainer), "sender": receive(engine)}
        return found


def row(num_bytes: int, sent: dict[str, list[float]], taken: dict[str, list[float]]) -> dict[str, float]:
    """Return medians, best times and bandwidths of one size."""
    times = {name: values[WARM_UP:] for name, values in (sent | taken).items()}
    median = {name: statistics.median(values) for name, values in times.items()}
    best = {name: min(values) for name, values in times.items()}
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


@contextlib.contextmanager
def running(setup: Setup) -> Iterator[tuple[Connection, Connection]]:
    """Run both processes on a prepared host; give the connections that their results come from."""
    backend = setup.load()
    apart = setup.placement == "disaggregated" and backend.capabilities().num_devices > 1
    context = multiprocessing.get_context("spawn")
    talk, results = context.Pipe(), (context.Pipe(), context.Pipe())
    with backend.prepare_host(setup.placement):
        processes = []
        for number, (role, work) in enumerate((("engine", engine), ("trainer", trainer))):
            process = context.Process(
                target=work, args=(setup, talk[number], results[number][1]), daemon=True
            )
            with patch.dict(os.environ, backend.child_env(role, SHARE, number if apart else 0)):
                process.start()
            processes.append(process)
        for line in (*talk, results[0][1], results[1][1]):
            line.close()  # a process that dies is seen by the other one, and here
        yield results[0][0], results[1][0]
        for process in processes:
            process.join(TIMEOUT_S)


def receive(line: Connection) -> Any:
    """Return the next result; SystemExit if its process has died."""
    try:
        return line.recv()
    except EOFError:
        raise SystemExit("a process of the measurement has died: see above") from None


def main() -> int:
    """Measure what the command line asks for and print it; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--placement", default="colocated", choices=["colocated", "disaggregated"])
    parser.add_argument("--sizes-mb", type=float, nargs="+", default=[0.25, 1, 4, 16, 64, 160])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--soak", type=int, default=0, metavar="SAMPLES")
    parser.add_argument("options", nargs="*", help="of the backend: mps=never …")
    found = parser.parse_args()
    sizes = tuple(round(size * 1e6) for size in found.sizes_mb)
    setup = Setup(found.backend, tuple(found.options), found.placement, sizes, found.repeats, found.soak)
    backend = setup.load()
    document = {
        "benchmark": "transport",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions("torch", "spec-core") | backend.probe().versions,
        "backend": backend.config.model_dump(mode="json"),
        "placement": setup.placement,
        **measured(setup),
    }
    json.dump(document, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
