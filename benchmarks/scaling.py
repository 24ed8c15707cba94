"""Measure what the controller of a run costs, by the number of workers.

    python benchmarks/scaling.py --toy      # seconds
    python benchmarks/scaling.py            # some minutes; 5,000 workers need 10,000 descriptors (ulimit -n)

Prints one JSON document. The controller is the real one, with a socket to each worker. Engines and trainer ranks are
stand-ins in simulated time (``simulated_run.py``), as fast as they were measured on H200s; their CPU time is left
out. README.md explains the fields.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from measure import growth, machine, versions
from simulated_run import CAPTURE, MEAN_TOKENS, SCHEMA, STEP, MeasuredSpeed, SimulatedLauncher, random_data

from spec_backend_cpu.backend import CpuBackend
from spec_processes import collect_rarely
from spec_strategy_fsdp.strategy import FsdpStrategy
from spec_trainer.base.progress import StepProgress
from spec_trainer.base.stop_request import StopRequest
from spec_trainer.configuration.run import run_config_type
from spec_trainer.run.batch_schedule import BatchSchedule, BatchSettings
from spec_trainer.run.spec import RunSpec
from spec_trainer.workers.worker_driver import WorkerDriver
from spec_trainer.workers.worker_specs import worker_specs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SAMPLES_PER_RANK = 4
"""Samples that a rank trains in a step, on average: 8,192 tokens, as those of the measured steps."""


@dataclass(frozen=True)
class Size:
    """Size of a simulated run."""

    engines: int
    ranks: int
    samples: int
    """Least number of samples to train."""
    slow_engines: int = 0
    """Engines that are ten times slower than the others."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return max(2, -(-self.samples // (self.ranks * SAMPLES_PER_RANK)))


SIZES = (
    Size(10, 10, 20_000),
    Size(10, 40, 20_000),
    Size(100, 400, 20_000),
    Size(1_000, 1_000, 40_000),
    Size(100, 100, 40_000, slow_engines=1),
    Size(1_000, 4_000, 64_000),
)
STARTS = (Size(100, 400, 0), Size(200, 800, 0), Size(400, 1_600, 0), Size(1_000, 4_000, 0))
DEATHS = (Size(10, 10, 4_000), Size(100, 100, 8_000), Size(1_000, 1_000, 16_000))
LIMITS = {
    "cost_at_1000_engines_over_10": 1.2,
    "cost_at_4000_ranks_over_40": 1.2,
    "samples_per_s": 20_000,
    "start_exponent": 1.3,
}


def run_spec(size: Size, output: Path) -> RunSpec:
    """Return a run of that size, with ``output`` as its run directory."""
    config = run_config_type(strategy=FsdpStrategy.Config)(
        target="simulated",
        output=output,
        data=cast("Any", {"path": "simulated"}),
        **cast(
            "Any",
            {
                "backend": {"name": "cpu"},
                "draft": {"name": "eagle3"},
                "strategy": {"name": "fsdp"},
                "engine": {"name": "hf", "replicas": size.engines, "batch_tokens": 4 * MEAN_TOKENS},
                "train": {
                    "ranks": size.ranks,
                    "steps": size.steps,
                    "global_batch_tokens": SAMPLES_PER_RANK * MEAN_TOKENS * size.ranks,
                },
                "placement": {"kind": "disaggregated"},
                "launcher": {"name": "simulated"},
                "timeouts": {"peer_s": 1e6},
            },
        ),
    )
    data = random_data(size.ranks * SAMPLES_PER_RANK * (size.steps + 1))
    return RunSpec(
        config=config,
        backend=CpuBackend(CpuBackend.Config(name="cpu")),
        draft=cast("Any", None),
        engine_type=cast("Any", None),
        optimizer=cast("Any", None),
        strategy_type=FsdpStrategy,
        launcher_type=SimulatedLauncher,
        target=cast("Any", None),
        schema=SCHEMA,
        schedule=BatchSchedule(data, BatchSettings.from_config(config, FsdpStrategy)),
    )


def measured(size: Size, kills: bool = False) -> dict[str, Any]:
    """Simulate a run, in which an engine dies or not; return what the controller has done and taken."""
    with TemporaryDirectory() as folder:
        spec = run_spec(size, Path(folder))
        spec.directory.logs.mkdir()
        launcher = cast("SimulatedLauncher", spec.launcher())
        slow = {f"engine-{index}": 10.0 for index in range(size.slow_engines)}
        launcher.simulate(spec, MeasuredSpeed.read(), slow, kills)
        began = time.process_time()
        workers = list(worker_specs(spec, Path("simulated")))
        placed = time.process_time() - began
        began = launcher.controller_cpu_s()
        with WorkerDriver(spec, launcher, StopRequest(), StepProgress(size.steps)).started(workers) as driver:
            driver.train(spec)
        launcher.forget()
    samples = sum(len(spec.schedule.train_item(step).sample_ids) for step in spec.schedule.steps)
    return {
        "samples": samples,
        "messages": launcher.work_messages,
        "placed_s": placed,
        "started_s": launcher.marks["work"] - began,
        "worked_s": launcher.marks["stop"] - launcher.marks["work"],
        "simulated_s": launcher.clock_s,
        "first_s": launcher.waited_s[0],
        "waited_s": sum(launcher.waited_s[1:]),
        "lost": launcher.num_lost,
        "recovered_s": launcher.recovered_s,
    }


def in_turns(sizes: Sequence[Size], repeats: int) -> Iterator[tuple[Size, list[dict[str, Any]]]]:
    """Measure every size once, then every size again: what else the machine does meets all of them."""
    rounds = [[measured(size) for size in sizes] for _ in range(repeats)]
    return zip(sizes, map(list, zip(*rounds, strict=True)), strict=True)


def work_row(size: Size, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a size in ``work``."""
    best = min(runs, key=lambda run: run["worked_s"])
    trained_s = best["simulated_s"] - best["first_s"]
    return {
        "engines": size.engines,
        "slow_engines": size.slow_engines,
        "ranks": size.ranks,
        "steps": size.steps,
        "samples": best["samples"],
        "messages_per_sample": best["messages"] / best["samples"],
        "cpu_us_per_sample": 1e6 * best["worked_s"] / best["samples"],
        "all_cpu_us_per_sample": [1e6 * run["worked_s"] / run["samples"] for run in runs],
        "samples_per_s": best["samples"] / best["worked_s"],
        "simulated_samples_per_s": best["samples"] / trained_s,
        "wait_share": best["waited_s"] / trained_s,
        "busy": best["worked_s"] / trained_s,
    }


def start_row(size: Size, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a number of workers in ``start``."""
    best = min(runs, key=lambda run: run["placed_s"] + run["started_s"])
    return {
        "workers": size.engines + size.ranks,
        "place_cpu_ms": 1e3 * best["placed_s"],
        "start_cpu_ms": 1e3 * best["started_s"],
    }


def death_row(size: Size) -> dict[str, Any]:
    """Return the row of a size in ``deaths``."""
    quiet, found = measured(size), measured(size, kills=True)
    return {
        "engines": size.engines,
        "ranks": size.ranks,
        "lost_samples": found["lost"],
        "recovered_ms": 1e3 * found["recovered_s"],
        "longer_ms": 1e3 * (found["simulated_s"] - quiet["simulated_s"]),
    }


def checks(work: list[dict[str, Any]], start: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each limit with its value."""
    cost = {(row["engines"], row["ranks"]): row["cpu_us_per_sample"] for row in work}
    total = [row["place_cpu_ms"] + row["start_cpu_ms"] for row in start]
    values = {
        "cost_at_1000_engines_over_10": cost[1_000, 1_000] / cost[10, 10],
        "cost_at_4000_ranks_over_40": cost[1_000, 4_000] / cost[10, 40],
        "samples_per_s": min(row["samples_per_s"] for row in work),
        "start_exponent": growth([row["workers"] for row in start], total),
    }
    return {
        name: {
            "value": value,
            "limit": LIMITS[name],
            "met": value >= LIMITS[name] if name == "samples_per_s" else value <= LIMITS[name],
        }
        for name, value in values.items()
    }


def main() -> int:
    """Measure, print, and return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="few workers, no limits")
    parser.add_argument("--repeats", type=int, default=3)
    found = parser.parse_args()
    collect_rarely()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sizes = (Size(2, 4, 100), Size(8, 16, 200, slow_engines=1)) if found.toy else SIZES
    starts = (Size(2, 8, 0), Size(4, 16, 0)) if found.toy else STARTS
    deaths = (Size(2, 4, 100),) if found.toy else DEATHS
    repeats = 1 if found.toy else found.repeats
    document = {
        "benchmark": "scaling",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions("spec-core", "spec-trainer", "numpy"),
        "timing": [f"results/{file.name}" for file in (CAPTURE, STEP)],
        "samples_per_rank": SAMPLES_PER_RANK,
        "work": [work_row(size, runs) for size, runs in in_turns(sizes, repeats)],
        "start": [start_row(size, runs) for size, runs in in_turns(starts, repeats)],
        "deaths": [death_row(size) for size in deaths],
    }
    document["checks"] = {} if found.toy else checks(document["work"], document["start"])
    json.dump(document, sys.stdout, indent=2)
    print()
    return 0 if all(check["met"] for check in document["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
