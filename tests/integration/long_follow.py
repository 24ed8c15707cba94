"""Follows a server for as many cycles as a day has, and measures whether anything grows.

    python -m tests.integration.long_follow                 # 1440 cycles: one a minute, for 24 hours
    python -m tests.integration.long_follow --cycles 60

``spec-trainer follow`` and the server (``live_server.py``) are processes of their own. Requests come without a pause,
so a cycle takes as long as its computation. After each of them the figures of both processes are read: memory, file
descriptors, sockets and threads; and so are the files of the run directory. The last lines are a table: the median
and the largest figure of the first half of the cycles, without a tenth in which caches fill, and of the second half.
Exit code 1 if a median and the smallest figure grew: a leak raises both, and on a busy machine more looks meet a
checkpoint that is written.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psutil

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE

from ..free_port import free_port
from ..random_targets import save_random_target
from . import draft_server, launching, live_server

LIMIT_S = 180
"""Longest time of one cycle, on a machine that is busy with other things."""
ROUTES = ("/v1/completions", "/ask")
EVERY = 8
WORDS = [
    f"follow.every={EVERY}", "follow.passes=2", "follow.held_out=0.3", "follow.kept=64",
    "follow.window=32", "follow.poll_s=0.05", "follow.retention.rows=64", "train.lr=5e-3",
    "train.global_batch_tokens=256", "draft.num_steps=2", "data.eval_samples=0",
]  # fmt: skip
MAY_GROW = {
    "run directory: files": 4, "retained requests: KiB": 8, "follow: MiB": 48.0, "server: MiB": 48.0,
    "follow: descriptors": 2, "server: descriptors": 2,
}  # fmt: skip
"""Growth that is none: the first pushed draft, what allocators keep, a connection that is open at a look."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=1440)
    cycles = parser.parse_args().cycles
    os.environ[DRAFT_TOKEN_VARIABLE] = draft_server.TOKEN
    os.environ[LIVE_REQUESTS_VARIABLE] = json.dumps({"share": 1.0, "labels": ["a", "b"]})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        return report(followed(Path(folder), cycles, stack))


def followed(folder: Path, cycles: int, stack: ExitStack) -> list[dict[str, float]]:
    """Return the figures after each cycle."""
    port, metrics = free_port(), f"127.0.0.1:{free_port()}"
    target = save_random_target(folder, "llama", initializer_range=0.6)
    output, log = folder / "run", folder / "log"
    words = ["follow", f"target={target}", f"output={output}", f"follow.metrics={metrics}", *WORDS]
    words += ["--server", f"http://127.0.0.1:{port}"]
    with log.open("wb") as errors:
        process = subprocess.Popen([*launching.program(), *words], stdout=errors, stderr=errors)
    stack.callback(process.wait)
    stack.callback(process.kill)
    start = output / "decoded" / "draft-0"

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.02)

    until(start.exists)
    url = stack.enter_context(draft_server.serving(target, start, live_server.__file__, port))
    server = next(
        child
        for child in psutil.Process().children()
        if child.pid != process.pid and "live_server" in str(child.cmdline())
    )
    found: list[dict[str, float]] = []
    draw = random.Random(1)
    steps = 0.0
    for cycle in range(cycles):
        headers = {"x-draft-label": draw.choice(["a", "b", f"made up {cycle}"])} if cycle % 2 else {}
        while live_server.scraped(metrics).total("spec_follow_steps") <= steps:
            asked = [[draw.randrange(12) for _ in range(draw.randrange(3, 9))] for _ in range(EVERY)]
            live_server.ask(url, asked, ROUTES[cycle % 2], **headers)
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.05)
        steps = live_server.scraped(metrics).total("spec_follow_steps")
        found.append(figures(output, follow=psutil.Process(process.pid), server=server))
        if cycle % 50 == 49:
            print(f"{cycle + 1} cycles: {found[-1]}", flush=True)
    for name in ("verdicts", "pushes", "requests"):
        print(f"{name}: {live_server.scraped(metrics).total(f'spec_follow_{name}_total'):.0f}")
    return found


def figures(output: Path, **processes: psutil.Process) -> dict[str, float]:
    # os.walk passes over folders that are removed meanwhile
    files = [name for _, _, names in os.walk(output) for name in names if "-journal" not in name]
    found: dict[str, float] = {
        "run directory: files": len(files),
        "retained requests: KiB": (output / "requests.sqlite3").stat().st_size / 1024,
    }
    for name, process in processes.items():
        with process.oneshot():
            found |= {
                f"{name}: MiB": process.memory_info().rss / 2**20,
                f"{name}: descriptors": process.num_fds(),
                f"{name}: threads": process.num_threads(),
                f"{name}: children": len(process.children(recursive=True)),
            }
        found[f"{name}: sockets"] = len(process.net_connections("all"))
    return found


def report(found: Sequence[dict[str, float]]) -> int:
    """Print the median and the largest figure of each half; return 1 if a figure grew."""
    early, late = found[len(found) // 10 : len(found) // 2], found[len(found) // 2 :]
    grew = []
    print(f"{len(found)} cycles{'':23} first half          second half")
    for name in found[0]:
        before, after = ([one[name] for one in half] for half in (early, late))
        print(f"{name:28}", *(f"{median(half):10.1f} {max(half):8.1f}" for half in (before, after)))
        if all(of(after) > of(before) + MAY_GROW.get(name, 1) for of in (median, min)):
            grew.append(name)
    print(f"grew: {', '.join(grew) or 'nothing'}")
    return int(bool(grew))


if __name__ == "__main__":
    sys.exit(main())
