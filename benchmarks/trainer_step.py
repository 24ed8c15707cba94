"""Measure time and memory of a draft's training step: forward, backward and AdamW through the real strategy.

    python benchmarks/trainer_step.py            # JSON on stdout, about three minutes on two idle cores
    python benchmarks/trainer_step.py --toy      # seconds, for the tests
    python benchmarks/trainer_step.py --backend cuda --peers --profile    # a minute on an H200
    python benchmarks/trainer_step.py --backend cuda --drafts             # each other draft
    python benchmarks/trainer_step.py --backend cuda --shapes small       # small targets: does the host lead?
    python benchmarks/trainer_step.py --backend cuda --lengths            # one document, ever longer

Every row is a process of its own, so that its peak memory is its own. Rows of ``--drafts`` and ``--lengths`` share
one, because an accelerator's peak can be reset. The command itself does not import torch.
Exit code 1: a limit in ``checks`` was missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from draft_shapes import DRAFTS, LENGTHS, document_cases
from measure import growth, line, machine, versions
from peer_shapes import SHAPES, TARGET, compared
from small_shapes import SHAPES as SMALL_SHAPES
from small_shapes import SMALL, limits

from spec_processes import collect_rarely
from spec_trainer.configuration import read_configuration

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("trainer_step")

PACKAGES = (
    "torch",
    "spec-core",
    "spec-draft-eagle3",
    "spec-draft-dflash",
    "spec-draft-dspark",
    "spec-trainer",
)
OPTIONAL_PACKAGES = ("triton", "spec-backend-cuda")
PARTS = ("dense", "tokens", "sequences", "num_steps")
IMPLEMENTATIONS = ("strategy", "modelopt", "modelopt-compiled")
# Cost grows as size to the power of: attention over step 0 is quadratic, everything else linear.
TIME_LIMITS = {"tokens": 1.3, "sequences": 1.1, "num_steps": 1.1}
MEMORY_LIMIT = 1.1
LOSS_LIMIT = 1e-4
TOY: dict[str, Any] = {
    "hidden_size": 32,
    "head_dim": 16,
    "vocab_size": 96,
    "draft_vocab_size": 64,
    "num_steps": 2,
    "block_size": 4,
    "num_layers": 2,
    "num_anchors": 4,
    "tokens": 24,
    "repeats": 2,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Work and shapes of one process."""

    implementation: str = "strategy"
    draft: str = "eagle3"
    backend: str = "cpu"
    hidden_size: int = 256
    head_dim: int = 64
    num_heads: int | None = None
    """Query heads of the target; None: as many as its width holds."""
    num_kv_heads: int | None = None
    """Key-value heads of the target; None: a fourth of its query heads."""
    vocab_size: int = 8192
    draft_vocab_size: int = 4096
    num_steps: int = 5
    block_size: int = 16
    num_layers: int = 5
    num_anchors: int = 512
    """Anchors per sequence; for drafts of blocks, like the two before it."""
    unsupervised: float | None = None
    """Share of each sequence, at its front, that no loss reads; None: a dialogue of short turns."""
    tokens: int = 1024
    """Tokens per sequence."""
    sequences: int = 1
    """Sequences of each pass."""
    passes: int = 1
    """Passes forward and backward before the one step of the optimizer."""
    dtype: str = "float32"
    fp8: str = ""
    """Products in 8-bit floating point: ``frozen`` or ``layers``, as ``train.fp8``."""
    threads: int = 1
    """CPU threads. One: CPU time is then free of threads that spin while they wait."""
    warmup: int = 1
    repeats: int = 5
    peak_tflops: float | None = None
    """Peak of the device in ``dtype``, for the model FLOP utilisation."""
    profile: bool = False
    """Whether to add the step's kernels by time, and where the host waits for the device."""
    options: tuple[str, ...] = ()
    """Further options of the draft, each as key=value."""

    def draft_options(self) -> dict[str, Any]:
        """Return section ``draft`` of a run without its name; Eagle3 as others have it, without further norms."""
        vocabulary, norms = {"vocab_size": self.draft_vocab_size}, {"fc_norm": False, "norm_output": False}
        chains = {
            "eagle3": {"num_steps": self.num_steps, **vocabulary, **norms},
            "mtp": {"num_steps": self.num_steps},
            "peagle": vocabulary,
        }
        names = ("block_size", "num_layers", "num_anchors")
        shapes = chains.get(self.draft) or {name: getattr(self, name) for name in names}
        return shapes | read_configuration(None, {}, self.options)


class Runner:
    """Runs each case once, however many parts of the document ask for it."""

    def __init__(self) -> None:
        """Begin without results."""
        self._rows: dict[Case, dict[str, Any]] = {}

    def __call__(self, case: Case) -> dict[str, Any]:
        """Return the row of ``case``."""
        if case not in self._rows:
            (self._rows[case],) = _run(case)
        return self._rows[case]

    def compare(self, case: Case) -> dict[str, Any]:
        """Return the row of the plain dense implementation, and its costs over those of ``case``."""
        ours, dense = self(case), self(replace(case, implementation="dense"))
        pairs = zip(ours["losses"], dense["losses"], strict=True)
        return {
            "row": dense,
            "cpu_time_ratio": dense["cpu_ms"] / ours["cpu_ms"],
            "wall_time_ratio": dense["wall_ms"] / ours["wall_ms"],
            "memory_ratio": dense["peak_mib"] / ours["peak_mib"],
            "loss_difference": max(abs(own - other) / abs(other) for own, other in pairs),
        }

    def together(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Return the rows of all cases, measured one after the other in one process."""
        return _run(*cases)

    def lengthen(self, series: dict[str, list[Case]]) -> dict[str, Any]:
        """Return rows of one document of growing length, and how costs grow over those that fit the memory."""
        rows = iter(self.together([case for cases in series.values() for case in cases]))
        return {name: _grown([next(rows) for _ in cases]) for name, cases in series.items()}

    def scale(self, case: Case, axis: str, sizes: Sequence[int]) -> dict[str, Any]:
        """Return how costs grow along one axis; ``step_mib`` leaves out what is there before the first step."""
        # Shorter sequences where there are many: attention must not hide what grows with their number.
        base = replace(case, tokens=case.tokens // 2) if axis == "sequences" else case
        rows = [self(replace(base, **{axis: size})) for size in sizes]
        costs = ("cpu_ms", "wall_ms", "peak_mib", "step_mib")
        return {
            "sizes": list(sizes),
            "rows": rows,
            "exponents": {cost: growth(sizes, [row[cost] for row in rows]) for cost in costs},
            "cpu_ms_line": line(sizes, [row["cpu_ms"] for row in rows]),
        }


def main() -> int:
    """Measure what the command line asks for and print it; return 1 if a limit was missed."""
    collect_rarely()  # as a rank does
    started, options = time.monotonic(), _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.case:
        from trainer_step_case import run_cases

        for row in run_cases([Case(**_hashable(json.loads(case))) for case in options.case]):
            print(json.dumps(row), flush=True)
        return 0
    case, runner = _case(options), Runner()
    document: dict[str, Any] = {
        "benchmark": "trainer_step",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(*PACKAGES, *OPTIONAL_PACKAGES),
        "shapes": asdict(case),
    }
    if options.peers:
        rows = {name: runner(replace(case, **shape)) for name, shape in SHAPES.items()}
        # Toy sizes are not the peers'.
        document["peers"] = rows if options.toy else {name: compared(name, row) for name, row in rows.items()}
        print(json.dumps(document, indent=2))
        return 0
    if options.drafts:
        cases = [replace(case, **shape | (TOY if options.toy else {})) for shape in DRAFTS.values()]
        document["drafts"] = dict(zip(DRAFTS, runner.together(cases), strict=True))
        print(json.dumps(document, indent=2))
        return 0
    if options.shapes:
        # Each in its own process: a profiler that has run once slows down what the process does afterwards.
        toy = TOY if options.toy else {}
        document["small"] = {n: runner(replace(case, **shape | toy)) for n, shape in SMALL_SHAPES.items()}
        return _print(document, limits(document["small"]))
    if options.lengths is not None:
        lengths = tuple(options.lengths) or ((16, 32) if options.toy else LENGTHS)
        series = document_cases(lengths).items()
        document["lengths"] = runner.lengthen(
            {name: [replace(case, **shape) for shape in shapes] for name, shapes in series}
        )
        print(json.dumps(document, indent=2))
        return 0
    document["step"] = runner(case)
    if "dense" in options.parts:
        document["dense"] = runner.compare(case)
    axes = [(axis, sizes) for axis, sizes in _axes(options.toy).items() if axis in options.parts]
    document["scaling"] = {axis: runner.scale(case, axis, sizes) for axis, sizes in axes}
    document["seconds"] = round(time.monotonic() - started, 1)
    return _print(document, _limits(document, slopes=not options.toy))


def _print(document: dict[str, Any], found: list[tuple[str, float, float]]) -> int:
    """Print the document with each limit beside its value; return 1 if a limit was missed."""
    document["checks"] = [
        {"check": name, "value": value, "limit": limit, "ok": value <= limit} for name, value, limit in found
    ]
    print(json.dumps(document, indent=2))
    return 0 if all(check["ok"] for check in document["checks"]) else 1


def _axes(toy: bool) -> dict[str, tuple[int, ...]]:
    if toy:
        return {"tokens": (12, 24), "sequences": (1, 2), "num_steps": (1, 2)}
    return {"tokens": (512, 1024, 2048, 4096), "sequences": (1, 2, 4, 8), "num_steps": (1, 3, 5, 7)}


def _limits(document: dict[str, Any], slopes: bool) -> list[tuple[str, float, float]]:
    """Return each limit and its value; without slopes at toy shapes, which are all overhead."""
    found: list[tuple[str, float, float]] = []
    if "dense" in document:
        found.append(("loss difference from dense", document["dense"]["loss_difference"], LOSS_LIMIT))
    for axis, part in document["scaling"].items() if slopes else ():
        found.append((f"time exponent over {axis}", part["exponents"]["cpu_ms"], TIME_LIMITS[axis]))
        found.append((f"memory exponent over {axis}", part["exponents"]["step_mib"], MEMORY_LIMIT))
    return found


def _grown(rows: list[dict[str, Any]]) -> dict[str, Any]:
    measured = [row for row in rows if "failed" not in row]
    sizes = [row["tokens"] for row in measured]
    costs = {cost: [row[cost] for row in measured] for cost in ("wall_ms", "peak_mib", "step_mib")}
    # The peak of a process on the CPU stays, so a later row may have nothing above it.
    grows = {cost: values for cost, values in costs.items() if len(values) > 1 and min(values) > 0}
    return {"rows": rows, "exponents": {cost: growth(sizes, values) for cost, values in grows.items()}}


def _run(*cases: Case) -> list[dict[str, Any]]:
    """Return the rows of ``cases``, measured in one process of their own."""
    threads = str(cases[0].threads)
    command = [sys.executable, __file__, "--case", *(json.dumps(asdict(case)) for case in cases)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' and '.join(map(str, cases))} ended with exit code {done.returncode}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        log.info("%s", _summary(row))
    return rows


def _summary(row: dict[str, Any]) -> str:
    shape = "{implementation:8} {tokens:5} tokens x {sequences}, {num_steps} steps: "
    costs = (
        "{failed}" if "failed" in row else "{cpu_ms:8.1f} ms CPU, {wall_ms:8.1f} ms wall, {peak_mib:6.0f} MiB"
    )
    return (shape + costs).format_map(row)


def _hashable(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a case's fields as they were before JSON made lists of tuples."""
    return fields | {"options": tuple(fields["options"])}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny shapes; exponents are not judged")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="what to add to the step")
    parser.add_argument(
        "--peers", action="store_true", help="other projects' shapes of Qwen3-8B instead, beside their times"
    )
    parser.add_argument("--drafts", action="store_true", help="a step of each other draft instead")
    parser.add_argument(
        "--shapes", choices=["small"], help="a step of each draft at shapes of small targets instead"
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="*",
        metavar="TOKENS",
        help=f"one document instead, with and without draft.checkpoint_activations; default {LENGTHS}",
    )
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    for name, default in asdict(Case()).items():
        flag = "--" + name.replace("_", "-")
        if name == "implementation":
            parser.add_argument(flag, choices=IMPLEMENTATIONS, help="of eagle3; default strategy")
            continue
        if isinstance(default, tuple):
            parser.add_argument(flag, nargs="+", type=str, metavar="KEY=VALUE", help="of the draft")
            continue
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=None)
            continue
        kind = int if name.startswith("num_") else float if default is None else type(default)
        parser.add_argument(flag, type=kind, help=f"default {default}; toy {TOY.get(name, default)}")
    options = parser.parse_args()
    plain = {"dtype": "float32", "backend": "cpu", "draft": "eagle3", "passes": 1}
    dense_runs = all(getattr(options, name) in (None, value) for name, value in plain.items())
    tables = options.peers or options.drafts or options.shapes or options.lengths is not None
    if "dense" in options.parts and not dense_runs and not tables:
        parser.error(
            "the dense implementation is of eagle3, in float32 on the cpu, in one pass; leave it out with --parts"
        )
    theirs = options.implementation not in (None, "strategy")
    if theirs and (options.parts or tables or options.draft not in (None, "eagle3")):
        parser.error(
            f"--implementation {options.implementation} is one step of eagle3: add --parts, without names"
        )
    return options


def _case(options: argparse.Namespace) -> Case:
    given = {name: getattr(options, name, None) for name in asdict(Case())}
    given["options"] = tuple(options.options) if options.options else None
    tables = options.peers or options.drafts or options.lengths is not None
    preset = SMALL if options.shapes else TARGET if tables else {}
    return Case(
        **(preset | (TOY if options.toy else {}))
        | {name: value for name, value in given.items() if value is not None}
    )


if __name__ == "__main__":
    sys.exit(main())
