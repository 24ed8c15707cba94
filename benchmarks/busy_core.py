"""Time commands on idle cores and beside processes that are always busy; print one JSON document.

Each part is a whole process as a user starts it: a few steps of the quickstart's target, then ``plan``, ``train`` and
``evaluate`` on that target. Idle and busy runs take turns. Start it on a machine that does nothing else: ``load`` of
each part, the load average before it, says whether it did.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine, versions

from spec_processes import let_waiting_threads_sleep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROGRAM = str(Path(sys.executable).with_name("spec-trainer"))
_BUILD = "build-target"
_BUSY = "while True: pass"
LIMIT = 2.5
"""Most times of the idle time that a part should take beside one busy process on two cores."""


def main(words: Sequence[str]) -> None:
    """Measure every part, and print the document."""
    if words[:1] == [_BUILD]:
        return _build_target(Path(words[1]), int(words[2]))
    options = _options(words)
    with tempfile.TemporaryDirectory() as folder:
        parts = _parts(Path(folder), options)
        measured = {name: _measured(name, parts, options) for name in parts}
    document = {
        "machine": machine(),
        "versions": versions("torch", "spec-trainer"),
        "spins": os.environ.get("GOMP_SPINCOUNT", "as spec-trainer sets them"),
        "busy_processes": options.busy,
        "parts": measured,
        "checks": {
            name: {"wall_ratio": part["wall_ratio"], "limit": LIMIT, "ok": part["wall_ratio"] <= LIMIT}
            for name, part in measured.items()
        },
    }
    print(json.dumps(document, indent=2))
    if not options.toy and not all(check["ok"] for check in document["checks"].values()):
        sys.exit(1)
    return None


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, default=1, help="processes that are always busy")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each part, idle and busy each")
    parser.add_argument("--target-steps", type=int, default=30)
    parser.add_argument("--train-steps", type=int, default=20)
    parser.add_argument("--toy", action="store_true", help="two steps, once; its limits are not judged")
    options = parser.parse_args(words)
    if options.toy:
        options.repeats, options.target_steps, options.train_steps = 1, 2, 2
    return options


def _parts(folder: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each part; ``{n}`` stands for the number of its run."""
    rows = folder / "rows.jsonl"
    row = {"text": "def add(first, second):\n    return first + second\n" * 8}
    rows.write_text("".join(json.dumps(row | {"text": f"# {n}\n{row['text']}"}) + "\n" for n in range(200)))
    target, run = f"{folder}/target-0", f"{folder}/run-{{n}}"
    train = ["--target", target, "--data", str(rows), f"train.steps={options.train_steps}"]
    train.append("train.global_batch_tokens=2048")
    evaluate = [
        "--target",
        target,
        "--draft-model",
        f"{folder}/run-0/draft",
        "--prompts",
        f"{folder}/few.jsonl",
    ]
    Path(folder, "few.jsonl").write_text("".join(rows.read_text().splitlines(keepends=True)[:4]))
    return {
        "target": [sys.executable, __file__, _BUILD, f"{folder}/target-{{n}}", str(options.target_steps)],
        "plan": [PROGRAM, "plan", *train, "--output", f"{folder}/planned"],
        "train": [PROGRAM, "train", *train, "--output", run],
        "evaluate": [PROGRAM, "evaluate", *evaluate, "--max-new-tokens", "32", "--temperature", "0"],
    }


def _measured(name: str, parts: dict[str, list[str]], options: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()[0]
    runs: dict[str, list[tuple[float, float]]] = {"idle": [], "busy": []}
    for number in range(options.repeats):
        for side, (kind, found) in enumerate(runs.items()):
            command = [word.format(n=2 * number + side) for word in parts[name]]
            with _busy(options.busy if kind == "busy" else 0):
                found.append(_run(command))
            print(f"{name}, {kind}: {found[-1][0]:.1f} s, CPU {found[-1][1]:.1f} s", file=sys.stderr)
    wall = {kind: statistics.median(wall for wall, _ in found) for kind, found in runs.items()}
    cpu = {kind: statistics.median(cpu for _, cpu in found) for kind, found in runs.items()}
    return {
        "load": load,
        "wall_s": wall,
        "cpu_s": cpu,
        "wall_ratio": wall["busy"] / wall["idle"],
        "cpu_ratio": cpu["busy"] / cpu["idle"],
        "runs": {
            kind: {"wall_s": [w for w, _ in found], "cpu_s": [c for _, c in found]}
            for kind, found in runs.items()
        },
    }


@contextmanager
def _busy(number: int) -> Iterator[None]:
    """Keep ``number`` processes busy during the ``with`` block."""
    with ExitStack() as stack:
        for _ in range(number):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            stack.callback(process.kill)
        yield


def _run(command: Sequence[str]) -> tuple[float, float]:
    """Return wall time and CPU time of a command and its children, in seconds; it has to end well.

    The busy processes are waited for after the block only, so that their time does not count.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _build_target(folder: Path, steps: int) -> None:
    let_waiting_threads_sleep()  # as the command does, before torch is imported
    from spec_trainer.cli.quickstart.corpus import python_documents
    from spec_trainer.cli.quickstart.tiny_target import TinyTargetConfig, build_tiny_target

    build_tiny_target(folder, python_documents(None)[:200], TinyTargetConfig(steps=steps))


if __name__ == "__main__":
    main(sys.argv[1:])
