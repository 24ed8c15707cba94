"""Measure trainer and engine on devices of their own: each alone, then a real run of both.

    python benchmarks/disaggregated.py --backend cuda --engine vllm --setting eagle3      # two GPUs
    python benchmarks/disaggregated.py --toy        # seconds, on the CPU

Prints one JSON document, as ``colocated.py`` does. ``efficiency``: samples/s of the run over the smaller of all
engine replicas alone and all trainer ranks alone.
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
    parser.add_argument("--replicas", type=int, default=1, help="of the engine, one device each")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer, one device each")
    return end_to_end.main(parser, place)


def place(options: argparse.Namespace) -> end_to_end.Place:
    """Return engine replicas and trainer ranks, each on a device of its own."""
    replicas, ranks = options.replicas, options.ranks

    def ideal(engine: float, trainer: float) -> float:
        return min(replicas * engine, ranks * trainer)

    return end_to_end.Place(
        "disaggregated", replicas=replicas, ranks=ranks, devices=replicas + ranks, ideal=ideal
    )


if __name__ == "__main__":
    sys.exit(main())
