"""Measure a training step on two devices or more: a draft that is divided, against one whose batch is.

    python benchmarks/tensor_parallel.py --toy           # a minute, on the CPU
    python benchmarks/tensor_parallel.py --backend cuda  # some minutes on two H200, for each shape
    python benchmarks/tensor_parallel.py --backend cuda --ranks 4 --ways fsdp replicas tensor

Prints one JSON document; README.md explains the fields. Every row trains the same global batches, from the same
weights, in processes of its own; a row that runs out of memory says so and the others go on.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from measure import device_name, forget_peak, machine, memory_mib, timed, versions
from peer_shapes import TARGET
from trainer_step import OPTIONAL_PACKAGES, PACKAGES, TOY, Case

from spec_core import plugins
from spec_processes import collect_rarely
from spec_testing.processes import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from trainer_step_case import Problem

    from spec_core import Backend
    from spec_core.records import DraftBatch
    from spec_testing.processes import Rank

log = logging.getLogger("tensor_parallel")

LR = 1e-5
LIMIT_S = 300.0
"""Time that one row may take, with the start of its processes; its other ranks wait so long for a failed one."""
LOSS_LIMIT = {"bfloat16": 2e-2, "float32": 1e-4}
"""Largest relative difference from the first row's losses."""
WIDE = {"hidden_size": 7168, "vocab_size": 163_840, "tokens": 16_384}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b, eagle3, 2048 x 8": {"draft": "eagle3", "tokens": 2048, "sequences": 8},
    "wide, eagle3, 16384 x 2": {"draft": "eagle3", "sequences": 2, **WIDE},
    "wide, dflash, 16384 x 2": {"draft": "dflash", "sequences": 2, **WIDE},
}
"""Sequences of one global batch: a rank of ``fsdp`` puts its share through at once."""
DIVIDED = {"tensor_parallel": 2}
DISTRIBUTED = {"distributed_optimizer": True}


@dataclass(frozen=True)
class Way:
    """One way to train a batch on the devices."""

    strategy: str
    options: dict[str, Any]
    passes: int = 1
    """Micro-batches of a step: two, where a rank trains all sequences, make each as large as one of ``fsdp``."""


WAYS = {
    "fsdp": Way("fsdp", {}),
    "replicas": Way("fsdp", {"replicate": 2}),
    "data": Way("megatron", {}),
    "data, distributed optimizer": Way("megatron", DISTRIBUTED),
    "tensor": Way("megatron", DIVIDED, passes=2),
    "tensor, sequence": Way("megatron", {**DIVIDED, "sequence_parallel": True}, passes=2),
    "tensor, one pass": Way("megatron", DIVIDED),
}


def main() -> int:
    """Measure what the command line asks for and print it; return 1 if a way trains something else."""
    collect_rarely()
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    document: dict[str, Any] = {
        "benchmark": "tensor_parallel",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(*PACKAGES, *OPTIONAL_PACKAGES, "spec-strategy-megatron", "megatron-core"),
        "shapes": {},
    }
    for name in options.shapes:
        case = Case(**{**TARGET, **SHAPES[name], **_given(options)})
        rows = {way: _row(case, WAYS[way], options.ranks) for way in options.ways}
        document["shapes"][name] = {"case": asdict(case), "rows": rows, "checks": _checks(case, rows)}
        for way, row in rows.items():
            log.info("%s: %s: %s", name, way, {key: row[key] for key in row if key != "losses"})
    print(json.dumps(document, indent=2))
    return 0 if all(check["ok"] for shape in document["shapes"].values() for check in shape["checks"]) else 1


def _row(case: Case, way: Way, num_ranks: int) -> dict[str, Any]:
    """Return what all ranks measured of one way; ``failed`` where one of them ended."""
    with TemporaryDirectory() as folder:
        try:
            ranks = run_ranks(measure_rank, num_ranks, case, way, Path(folder), timeout_s=LIMIT_S)
        except AssertionError as error:  # a rank's failure, with its trace
            return {"failed": str(error).strip().splitlines()[-1], "trace": str(error)}
    return ranks[0] | {
        name: max(rank[name] for rank in ranks) for name in ("wall_ms", "ready_mib", "peak_mib")
    }


def measure_rank(me: Rank, case: Case, way: Way, folder: Path) -> dict[str, Any]:
    """Return time and memory of one rank's steps; the first rank starts as the others do."""
    with process_group(me, case, folder) as backend:
        return measure_way(me, case, way, backend)


@contextmanager
def process_group(me: Rank, case: Case, folder: Path) -> Iterator[Backend]:
    """Yield the backend of ``case``, with torch's process group of all ranks."""
    import torch
    import torch.distributed as dist

    from spec_core import Backend

    torch.set_num_threads(case.threads)
    plugin = plugins.load_available(Backend, case.backend)
    backend = plugin(plugin.Config(name=case.backend))
    backend.device(me.rank)
    init_method = f"file://{folder}/group"
    dist.init_process_group(
        backend.dist_backend, init_method=init_method, rank=me.rank, world_size=me.world_size
    )
    try:
        yield backend
    finally:
        dist.destroy_process_group()


def measure_way(me: Rank, case: Case, way: Way, backend: Backend) -> dict[str, Any]:
    """Return time and memory of this rank's steps, in the process group that there is."""
    import torch
    from trainer_step_case import default_optimizer, make_problem

    from spec_core import StepConfig, Strategy

    device = backend.device(me.rank)
    imported, _ = memory_mib(device)
    problem = make_problem(case, device)
    chosen = plugins.load_available(Strategy, way.strategy)
    config = chosen.Config.model_validate({"name": way.strategy, **way.options})
    hints = problem.draft.shard_hints(problem.target)
    chosen.check(config, problem.target, hints)
    place = chosen.data_parallel(config, me.rank, me.world_size)
    batches = micro_batches(problem, place.rank, place.size, way.passes)
    with chosen(config, StepConfig(dtype=case.dtype), default_optimizer(), device) as strategy:
        strategy.attach(problem.build(backend.kernel), hints)
        ops = strategy.vocabulary_ops(problem.target, problem.tensors)
        denominators = problem.denominators
        del problem  # a run has neither the whole vocabulary's tensors nor other ranks' samples
        ready, _ = memory_mib(device)
        forget_peak(device)
        losses: list[float] = []

        def step() -> None:
            losses.append(strategy.step(batches, denominators, ops, LR).output.loss.item())
            torch.get_device_module(device).synchronize()

        timed(step, case.warmup)
        timing = timed(step, case.repeats).summary()
    _, peak = memory_mib(device)
    return {
        "device": device_name(device),
        **timing,
        "tokens_per_s": 1e3 * case.sequences * case.tokens / timing["wall_ms"],
        "ready_mib": ready - imported,
        "peak_mib": peak - imported,
        "losses": losses,
    }


def micro_batches(problem: Problem, rank: int, size: int, passes: int) -> list[DraftBatch]:
    """Return this data-parallel rank's sequences of the global batch, in so many passes."""
    mine = range(rank, problem.case.sequences, size)
    return [_sequences(problem, mine[number::passes]) for number in range(passes)]


def _sequences(problem: Problem, chosen: range) -> DraftBatch:
    """Return some sequences of the global batch, as a batch."""
    import torch

    batch, tokens = problem.batch, problem.case.tokens
    spans = [batch.spans[index] for index in chosen]

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[span.start : span.stop] for span in spans])

    return replace(
        batch,
        input_ids_T=rows(batch.input_ids_T),
        hidden_TNH=rows(batch.hidden_TNH),
        loss_mask_T=rows(batch.loss_mask_T),
        spans=tuple(
            replace(span, start=place * tokens, stop=(place + 1) * tokens) for place, span in enumerate(spans)
        ),
    )


def _checks(case: Case, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how far each way's losses are from the first one's."""
    trained = {way: row["losses"] for way, row in rows.items() if "losses" in row}
    expected, limit = next(iter(trained.values()), []), LOSS_LIMIT[case.dtype]
    checks: list[dict[str, Any]] = []
    for way, losses in trained.items():
        value = max(abs(own - other) / abs(other) for own, other in zip(losses, expected, strict=True))
        checks.append({"check": f"losses of {way}", "value": value, "limit": limit, "ok": value <= limit})
    return checks


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny shapes in float32")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=tuple(SHAPES))
    parser.add_argument(
        "--ways", nargs="*", choices=WAYS, default=tuple(WAYS), help="the first is the reference"
    )
    parser.add_argument("--ranks", type=int, default=2, help="an even number; Megatron's ways divide by two")
    parser.add_argument("--repeats", type=int, help="timed steps")
    parser.add_argument("--tokens", type=int, help="tokens of each sequence, in place of the shape's")
    parser.add_argument("--draft-vocab-size", type=int, help="rows of eagle3's head")
    return parser.parse_args()


def _given(options: argparse.Namespace) -> dict[str, Any]:
    # Twice the width of other toys: two key-value heads, of which each rank takes one.
    toy = {**TOY, "hidden_size": 128, "dtype": "float32", "threads": 1} if options.toy else {}
    names = ("repeats", "tokens", "draft_vocab_size")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return {**toy, "backend": options.backend, **given}


if __name__ == "__main__":
    sys.exit(main())
