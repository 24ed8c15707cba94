"""Measure training steps of one long document whose rows several devices divide (context parallelism).

    python benchmarks/context_parallel.py --toy           # a minute, on the CPU
    python benchmarks/context_parallel.py --backend cuda  # some minutes on two GPUs

Prints one JSON document; README.md explains the fields. A number of devices that cannot hold a length says so, and
longer documents are then left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from measure import growth, machine, versions
from peer_shapes import TARGET
from tensor_parallel import LOSS_LIMIT, Way, measure_way, process_group
from trainer_step import OPTIONAL_PACKAGES, PACKAGES, TOY, Case

from spec_processes import collect_rarely
from spec_testing.processes import run_ranks

if TYPE_CHECKING:
    from spec_testing.processes import Rank

log = logging.getLogger("context_parallel")

DRAFTS = ("eagle3", "dflash")
LENGTHS = (16_384, 32_768, 65_536, 131_072)
LIMIT_S = 400.0
"""Time that the documents of one draft may take on one number of devices."""


def main() -> int:
    """Measure what the command line asks for and print it; return 1 if more devices train something else."""
    collect_rarely()
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    document: dict[str, Any] = {
        "benchmark": "context_parallel",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(*PACKAGES, *OPTIONAL_PACKAGES),
        "drafts": {},
    }
    toy = {**TOY, "hidden_size": 128, "dtype": "float32", "threads": 1} if options.toy else {}
    for draft in options.drafts:
        case = Case(**{**TARGET, "warmup": 1, "repeats": options.repeats, **toy, "backend": options.backend})
        case = Case(**{**asdict(case), "draft": draft, "options": ("checkpoint_activations=true",)})
        rows = {str(ranks): _rows(case, ranks, options.lengths) for ranks in options.ranks}
        document["drafts"][draft] = {"case": asdict(case), "ranks": rows, "checks": _checks(case, rows)}
        log.info("%s: %s", draft, json.dumps(rows))
    print(json.dumps(document, indent=2))
    return 0 if all(check["ok"] for draft in document["drafts"].values() for check in draft["checks"]) else 1


def _rows(case: Case, ranks: int, lengths: list[int]) -> dict[str, Any]:
    """Return a row for each length, of the slowest and the fullest rank, and the exponents of their costs."""
    with TemporaryDirectory() as folder:
        failed = None
        try:
            run_ranks(measure_lengths, ranks, case, lengths, Path(folder), timeout_s=LIMIT_S)
        except AssertionError as error:  # a rank's failure, with its trace
            failed = str(error).strip().splitlines()[-1]
        everyones = [_lines(Path(folder) / f"{rank}.jsonl") for rank in range(ranks)]
    rows = [
        first
        | {name: max(row[name] for row in (first, *others)) for name in ("wall_ms", "ready_mib", "peak_mib")}
        for first, *others in zip(*everyones, strict=False)
    ]
    costs = {name: [row[name] for row in rows] for name in ("wall_ms", "peak_mib")}
    exponents = {
        name: growth([row["tokens"] for row in rows], cost)
        for name, cost in costs.items()
        if len(rows) > 1
        and min(cost) > 0  # on a CPU, the peak of a process that measured others before may be 0
    }
    return {"rows": rows, "exponents": exponents, **({} if failed is None else {"failed": failed})}


def measure_lengths(me: Rank, case: Case, lengths: list[int], folder: Path) -> None:
    """Write a line for each length as soon as it is measured: a longer document may end the process."""
    import torch

    way = Way("fsdp", {"context_parallel": me.world_size})
    with process_group(me, case, folder) as backend:
        device = backend.device(me.rank)
        for tokens in lengths:
            row = measure_way(me, Case(**{**asdict(case), "tokens": tokens}), way, backend)
            with (folder / f"{me.rank}.jsonl").open("a", encoding="utf-8") as out:
                out.write(json.dumps({"tokens": tokens, **row}) + "\n")
            gc.collect()  # what a strategy and autograd's graph hold in cycles
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()


def _lines(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def _checks(case: Case, ranks: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how far the losses of each number of devices are from those of the first one."""
    losses = {name: {row["tokens"]: row["losses"] for row in part["rows"]} for name, part in ranks.items()}
    (_, expected), *others = losses.items()
    limit = LOSS_LIMIT[case.dtype]
    return [
        {
            "check": f"losses of {name} ranks, {tokens} tokens",
            "value": value,
            "limit": limit,
            "ok": value <= limit,
        }
        for name, own in others
        for tokens in own.keys() & expected.keys()
        for value in [max(abs(a - b) / abs(b) for a, b in zip(own[tokens], expected[tokens], strict=True))]
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny shapes in float32")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--drafts", nargs="*", choices=DRAFTS, default=DRAFTS)
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2], help="the first is the reference")
    parser.add_argument("--lengths", nargs="*", type=int, help="tokens of the document")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps")
    options = parser.parse_args()
    options.lengths = options.lengths or ([24, 48] if options.toy else list(LENGTHS))
    return options


if __name__ == "__main__":
    sys.exit(main())
