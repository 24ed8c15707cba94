"""Kills and stops the processes of a run, and damages its files between two commands, at steps drawn from a seed.

    python -m tests.integration.chaos --launcher local --placement colocated --seed 3 --faults 30   # make test-chaos

A command whose process was killed is given again. Where the newest checkpoint was damaged, the same command is
refused and names it; then it is given with ``--resume-from previous`` or ``step-N``, and often loses a trainer
before it has written the damaged step again. Where a link has taken the place of a file, the command is refused in
one line that names it, until the link is removed. Under ``ray`` the run is on a cluster of several nodes. Their
raylets are killed, too, but for that of the run's own node; each node comes back once its loss is told. Every fault
is named in the output of the run or in ``logs/replacements.jsonl``, every sample is trained exactly once, the final
weights are those of a run that nothing disturbed, bit for bit, and nothing is left. Exit code 1 if not.
"""

import argparse
import os
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from ..random_targets import save_random_target
from .disturbed_run import INLINE, KINDS, NUM_NODES, ON_NODES, PEER_S, Chaos
from .launching import Lab, write_rows, write_stranger
from .ray_nodes import ray_nodes


def main() -> None:
    """Run the quiet run and the disturbed one; print what happened."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launcher", default="local")
    parser.add_argument("--placement", default="disaggregated")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="further keys of both runs")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # else Ray's nodes and this host have different ones
    os.environ["RAY_TMPDIR"] = tempfile.gettempdir()  # what Ray keeps there is Ray's
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, ExitStack() as stack:
        temporary = Path(name) / "temporary"
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)
        chaos, quiet = prepare(stack, Path(name), given)
        start = time.monotonic()
        chaos.run(given.faults, given.steps)
        story = chaos.check(quiet, given.steps)
        left = [path.name for path in temporary.iterdir()]
        assert not left, f"left in the folder for temporary files: {left}"
    print(
        f"{given.launcher} {given.placement}, seed {given.seed}: {len(chaos.faults)} faults, {story}, "
        f"{time.monotonic() - start:.0f} s: every sample once, bitwise the weights of the quiet run, every fault "
        "named, nothing left"
    )


def prepare(stack: ExitStack, folder: Path, given: argparse.Namespace) -> tuple[Chaos, Path]:
    """Return what is to be disturbed, and the directory of the same run to which nothing has happened."""
    write_rows(folder / "held_out.jsonl")
    keys = {
        "target": save_random_target(folder / "target", "llama", initializer_range=0.6),
        "data.path": write_rows(folder / "rows.jsonl"),
        "data.eval_path": folder / "held_out.jsonl", "train.eval_every": 7,
        "train.steps": given.steps, "train.schedule": "constant", "train.lr": 3e-3, "train.warmup_steps": 5,
        "train.global_batch_tokens": 96, "train.save_every": 5, "train.keep": 4, "draft.num_steps": 3,
        "placement.kind": given.placement, "launcher.name": given.launcher,
    }  # fmt: skip
    kinds, tries = INLINE, {}
    if given.placement != "inline":
        keys |= {"engine.replicas": given.engines, "train.ranks": given.ranks}
        tries = {"engine__replacements": 1000, "train__restarts": 1000, "timeouts__peer_s": PEER_S}
        kinds = KINDS if given.launcher == "local" else ON_NODES
    keys |= dict(word.split("=", 1) for word in given.words)
    lab = stack.enter_context(Lab(folder, keys, write_stranger(folder / "stranger")))
    lab.train(folder / "quiet", timeout_s=600, launcher__name="local")
    chaos = Chaos(lab, folder / "chaos", tries, kinds, random.Random(given.seed))
    if given.launcher == "ray":
        chaos.nodes = stack.enter_context(ray_nodes(NUM_NODES))
        tries |= {"launcher__address": chaos.nodes.address, "launcher__env": {"OMP_NUM_THREADS": "1"}}
    return chaos, folder / "quiet"


if __name__ == "__main__":
    main()
