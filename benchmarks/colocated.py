r"""Measure trainer and engine on the same device: each alone, then a real run of both.

    python benchmarks/colocated.py --backend cuda --engine vllm --setting eagle3 -- backend.mps_threads=shared
    python benchmarks/colocated.py --toy        # seconds, on the CPU
    python benchmarks/colocated.py --backend cuda --engine vllm --setting eagle3 --passes 2 --phases both \
        --devices 2 --target-parallel 2 --draft-parallel 2 -- strategy.name=megatron

Prints one JSON document. ``trainer``: its step alone on the whole device. ``engine``: its capture alone on the whole
device. ``both``: ``spec-trainer train`` with ``placement.kind=colocated``, its steps after a warm-up by the wall
clock. ``efficiency``: samples/s of the run over what taking turns without any loss would give,
1 / (1 / engine alone + 1 / trainer alone). With ``--devices N`` each device has an engine replica and a trainer rank;
``--target-parallel`` and ``--draft-parallel``: so many devices divide one target or one draft by tensors.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import end_to_end

if TYPE_CHECKING:
    import argparse


def main() -> int:
    """Run the benchmark; return its exit code."""
    parser = end_to_end.parser(__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--target-parallel", type=int, default=1, help="devices of one engine replica")
    parser.add_argument("--draft-parallel", type=int, default=1, help="devices of one draft")
    return end_to_end.main(parser, place)


def place(options: argparse.Namespace) -> end_to_end.Place:
    """Return one trainer rank on each device, and as many engine replicas as there is room for."""
    devices, target, draft = options.devices, options.target_parallel, options.draft_parallel

    def ideal(engine: float, trainer: float) -> float:
        return devices / (1 / engine + 1 / trainer)

    return end_to_end.Place(
        "colocated",
        replicas=devices // target,
        ranks=devices,
        devices=devices,
        ideal=ideal,
        target_parallel=target,
        draft_parallel=draft,
    )


if __name__ == "__main__":
    sys.exit(main())
