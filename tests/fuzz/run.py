"""Thousands of damaged inputs, each read by a process of its own: ``python -m tests.fuzz.run --cases 2000 --seed 1``.

Prints every case in which a command did not keep its promise, and a table. A process may take 60 s, and 2 GB beyond
what it has when it begins; it may leave neither a process nor a temporary file. Exits with 1 where a promise was
broken.
"""

import argparse
import ctypes
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from . import cases, material, servers

LARGEST_BYTES = 2 << 30
_ADOPT_ORPHANS = 36
"""``PR_SET_CHILD_SUBREAPER`` of ``prctl``: what a case leaves running becomes a child of this process."""
_ENDING_S = 10
"""Seconds in which the processes of a command have to end after it."""


@dataclass
class Running:
    number: int
    case: cases.Case
    before: list[tuple[str, int]]
    output: Path
    started: float
    temporary: Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--group", nargs="*", help="groups of cases; by default all")
    parser.add_argument("--only", type=int, nargs="*", help="cases by their numbers, their output shown")
    asked = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= servers.ENVIRONMENT
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = place
        root = Path(place) / "material"
        root.mkdir()
        _in_a_child(lambda: material.build(root))
        _warm_up(root, Path(place))
        servers.address()  # starts it
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
        numbers = range(asked.cases) if asked.only is None else asked.only
        before = cases.listing(root)
        done, broken = _run_all(root, Path(place), asked, numbers)
        if cases.listing(root) != before:
            broken["all", "files outside of a case were changed"] += 1
        return _table(done, broken)


def _run_all(
    root: Path, place: Path, asked: argparse.Namespace, numbers: list[int] | range
) -> tuple[Counter, Counter]:
    done: Counter[str] = Counter()
    broken: Counter[tuple[str, str]] = Counter()
    running: dict[int, Running] = {}
    waiting, others = iter(numbers), _children()
    while True:
        while len(running) < asked.processes and (number := next(waiting, None)) is not None:
            one = _prepare(root, place, asked, number)
            running[_start(one)] = one
        if not running:
            return done, broken
        one, code, bytes_used = _wait(running)
        left = _left_running(running.keys() | others)
        out, err = (
            one.output.with_suffix(end).read_text(errors="surrogateescape") for end in (".out", ".err")
        )
        if asked.only is not None:
            print(one.case, code, out, err, sep="\n")
        found = _found(one, code, out, err, bytes_used) + left
        done[one.case.group] += 1
        for problem in found:
            broken[one.case.group, problem] += 1
        if found:
            print(
                f"case {one.number}, {one.case.group}, {one.case.what!r}: {', '.join(found)}: {err[-300:]!r}",
                flush=True,
            )


def _prepare(root: Path, place: Path, asked: argparse.Namespace, number: int) -> Running:
    folder = place / f"case-{number}"
    case = cases.make_case(root, folder, random.Random(f"{asked.seed} {number}"), asked.group)
    temporary, output = place / f"temporary-{number}", place / f"output-{number}"
    temporary.mkdir()
    return Running(number, case, cases.contents(case), output, time.monotonic(), temporary)


def _start(one: Running) -> int:
    pid = os.fork()
    if pid:
        return pid
    for descriptor, end in ((1, ".out"), (2, ".err")):
        file = os.open(one.output.with_suffix(end), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LARGEST_BYTES,) * 2)
    os.chdir(one.case.folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(one.temporary)
    from spec_trainer.cli.app import run

    code = 99
    try:
        code = run(one.case.words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(running: dict[int, Running]) -> tuple[Running, int, int]:
    """The next process that has ended, or had to be ended; on a busy machine it may take longer."""
    while True:
        longest = cases.LONGEST_S * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid in running:
            return running.pop(pid), os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
        for other, one in running.items():
            if time.monotonic() - one.started > longest:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.005)


def _found(one: Running, code: int, out: str, err: str, bytes_used: int) -> list[str]:
    found = cases.violations(one.case, code, out, err)
    found += cases.changes(one.case, one.before)
    if bytes_used > _own_bytes() + LARGEST_BYTES:
        found.append(f"more than {LARGEST_BYTES >> 30} GiB")
    if os.listdir(one.temporary):
        found.append("a temporary file is left")
    shutil.rmtree(one.temporary)
    shutil.rmtree(one.case.folder)
    for end in (".out", ".err"):
        one.output.with_suffix(end).unlink()
    return found


def _own_bytes() -> int:
    """Return the bytes of memory that this process has, with which each case begins."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _left_running(running: set[int]) -> list[str]:
    """End what a case has left besides ``running``, if it does not end by itself; return whether there was any."""
    until = time.monotonic() + _ENDING_S
    while left := _children() - running:
        if time.monotonic() > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return ["a process is left running"]
        for pid in left:
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)
    return []


def _children() -> set[int]:
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, task.read_text().split()))


def _table(done: Counter, broken: Counter) -> int:
    print("| group | cases | broken promises |\n|---|---|---|")
    for group in sorted(done):
        problems = ", ".join(
            f"{problem} {count}" for (name, problem), count in sorted(broken.items()) if name == group
        )
        print(f"| {group} | {done[group]} | {problems} |")
    print(f"| all | {sum(done.values())} | {sum(broken.values())} |")
    return int(bool(broken))


def _in_a_child(work) -> None:
    """Do work in a fork of this process, which keeps its threads and its changes to itself."""
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _warm_up(root: Path, place: Path) -> None:
    """Imports what commands import, once for all."""
    import torch

    from spec_trainer.cli.app import run

    torch.set_num_threads(1)
    for data in ("rows.jsonl", "rows.parquet"):
        words = ["--target", root / "target", "--data", root / data, "--output", place / "out"]
        assert run(["plan", *map(str, words)]) == 0


if __name__ == "__main__":
    sys.exit(main())
