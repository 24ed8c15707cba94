"""Kills ``spec-trainer push`` at its statements between prepare and the last commit; prints what became of it.

    python -m tests.integration.killed_pushes                  # each statement, the first and the last time
    python -m tests.integration.killed_pushes --statements 6

Two servers (``draft_server.py``) answer without a pause, and a process for each reads the stream of answers. The
statements are those that a whole push was seen to go through: in ``spec_core.weight_sync``, in what asks servers,
and in the weight transports. After each kill: what both servers serve, what ``spec-trainer serving`` says, and
whether the next push is committed everywhere. Exit code 1 where an answer was missing or wrong, a version had two
digests, ``serving`` said what is not so, or the next push failed.
"""

from __future__ import annotations

import argparse
import json
import linecache
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import spec_core.hosting
import spec_core.weight_sync
import spec_weight_transports
from spec_core.hosting import DRAFT_TOKEN_VARIABLE
from spec_trainer import cli, push_command

from . import draft_server, launching
from .chaos import make_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

LIMIT_S = 120
"""Longest time of one command, on a machine that is busy with other things."""
WATCHED = tuple(
    str(Path(str(package.__file__)).parent)
    for package in (spec_core.weight_sync, spec_core.hosting, spec_weight_transports)
)

Statement = tuple[str, int, str]
"""File, line and function."""


class Tracer:
    """Sees each statement that this process executes while ``Push.run`` does, on all of its threads."""

    def __init__(self, reached: Callable[[Statement], None]) -> None:
        self._reached, self._is_pushing = reached, False
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        if frame.f_code.co_qualname == "Push.run":
            self._is_pushing = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if event == "return" and code.co_qualname == "Push.run":
            self._is_pushing = False
        if event == "line" and self._is_pushing:
            with self._lock:
                self._reached((code.co_filename, frame.f_lineno, code.co_qualname))
        return self._step


@dataclass(frozen=True)
class Moment:
    """The time at which a statement is about to be executed."""

    statement: Statement
    time: int
    """1 for the first."""

    def kill(self) -> None:
        """Kill this process then."""
        seen = 0

        def reached(statement: Statement) -> None:
            nonlocal seen
            seen += statement == self.statement
            if seen == self.time:
                os.kill(os.getpid(), signal.SIGKILL)

        Tracer(reached).start()

    def __str__(self) -> str:
        file, line, function = self.statement
        text = f"{function}: {linecache.getline(file, line).strip()}"[:90]
        return text if self.time == 1 else f"{text} (time {self.time})"


@dataclass
class Row:
    """One kill of a pusher: the servers, ``serving`` and the next push after it."""

    moment: str
    killed: bool
    servers: list[str]
    serving: int
    """Exit code of ``serving``."""
    next_push: int
    problems: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        how = "killed" if self.killed else "not reached"
        return f"{how}; {', '.join(self.servers)}; serving exits {self.serving}; next push exits {self.next_push}"


def in_child(work: Callable[[], int]) -> tuple[int, str]:
    """Return the exit status of a fork of this process that does some work, and what it has written."""
    read, write = os.pipe()
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        code = 99
        try:
            signal.alarm(LIMIT_S)
            os.dup2(write, 1)
            os.dup2(write, 2)
            code = work()
            sys.stdout.flush()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as output:
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def command(*words: object, prepare: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Run ``spec-trainer`` in a fork of this process, which prepares itself first."""

    def work() -> int:
        prepare()
        return cli.run([str(word) for word in words])

    return in_child(work)


class Stream:
    """A process that reads a server's stream of answers into a file."""

    def __init__(self, url: str, file: Path) -> None:
        self._file = file
        if (child := os.fork()) == 0:
            try:
                self._read(url)
            finally:
                os._exit(1)
        self._child = child

    def _read(self, url: str) -> None:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=LIMIT_S)
        connection.request("GET", "/stream")
        with self._file.open("wb", buffering=0) as file:
            for line in connection.getresponse():
                file.write(line)

    def answers(self) -> list[dict[str, Any]]:
        lines = self._file.read_bytes().split(b"\n") if self._file.exists() else [b""]
        return [json.loads(line) for line in lines[:-1]]

    def has_ended(self) -> bool:
        return os.waitpid(self._child, os.WNOHANG)[0] != 0

    def kill(self) -> None:
        os.kill(self._child, signal.SIGKILL)


class Trial:
    """Two servers, and pushes of two drafts in turn."""

    def __init__(self, target: Path, drafts: Sequence[Path], urls: Sequence[str], folder: Path) -> None:
        self._target, self._drafts, self._urls, self._folder = target, drafts, urls, folder
        self._streams = [Stream(url, folder / f"stream-{number}") for number, url in enumerate(urls)]
        self._count = 0
        self._digests: dict[int, set[str]] = {}

    def moments(self) -> list[Moment]:
        """Return when each statement of a whole push comes first and last, in the order of their first times."""
        file = self._folder / "statements"

        def note(statement: Statement) -> None:
            with file.open("a") as notes:
                notes.write(json.dumps(statement) + "\n")

        code, text = self.push(Tracer(note).start)
        assert code == 0, text
        seen = Counter(tuple(json.loads(line)) for line in file.read_text().splitlines())
        linecache.clearcache()  # the lines that run are those of now
        return [Moment(statement, time) for statement, count in seen.items() for time in sorted({1, count})]

    def kill_at(self, moment: Moment) -> Row:
        before = [len(stream.answers()) for stream in self._streams]
        killed, text = self.push(moment.kill)
        statuses = [self._settled(url) for url in self._urls]
        serving, said = command("serving", "--json", "--of", *self._urls)
        row = Row(str(moment), killed == -signal.SIGKILL, [_named(status) for status in statuses], serving, 0)
        if not row.killed and killed != 0:
            row.problems.append(f"the push exits {killed}: {text}")
        agree = len({(status["version"], status["digest"]) for status in statuses}) == 1
        if (serving == 0) != agree or ("the servers differ" in said) == agree:
            row.problems.append(f"serving exits {serving} and says {said}")
        row.next_push, text = self.push()
        after = [self._settled(url) for url in self._urls]
        if row.next_push != 0 or len({_named(status) for status in after}) != 1:
            row.problems.append(f"the next push exits {row.next_push}, {after}: {text}")
        self._check_answers(row, [*statuses, *after], before)
        return row

    def push(self, prepare: Callable[[], None] = lambda: None) -> tuple[int, str]:
        """Push the draft whose turn it is to both servers."""
        draft = self._drafts[self._count % 2]
        self._count += 1
        words = ["push", "--target", self._target, "--draft-model", draft]
        return command(*words, *(word for url in self._urls for word in ("--to", url)), prepare=prepare)

    def _settled(self, url: str) -> dict[str, Any]:
        """Return what a server serves when no update is under way there."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            connection = HTTPConnection(url.removeprefix("http://"), timeout=LIMIT_S)
            connection.request(
                "GET", "/spec/draft/status", headers={"Authorization": f"Bearer {draft_server.TOKEN}"}
            )
            status = json.loads(connection.getresponse().read())["status"]
            connection.close()
            if status["state"] not in ("prepared", "received") or time.monotonic() > deadline:
                return status
            time.sleep(0.05)

    def close(self) -> None:
        for stream in self._streams:
            stream.kill()

    def _check_answers(self, row: Row, statuses: list[dict[str, Any]], before: list[int]) -> None:
        """Note where an answer is missing or wrong, or a version has had two digests."""
        if any(status["state"] == "quarantined" for status in statuses):
            row.problems.append(f"quarantined: {statuses}")
        for stream, count in zip(self._streams, before, strict=True):
            deadline = time.monotonic() + LIMIT_S
            while len(stream.answers()) <= count and time.monotonic() < deadline:
                time.sleep(0.05)
            fresh = stream.answers()[count:]
            if not fresh or stream.has_ended() or not all(answer["as_without"] for answer in fresh):
                row.problems.append(f"a stream has ended, or has a wrong answer: {fresh[-1:]}")
            statuses += fresh
        for status in statuses:
            if status["version"] is not None:
                self._digests.setdefault(status["version"], set()).add(status["digest"])
        row.problems += [
            f"version {version} is {', '.join(digests)}"
            for version, digests in self._digests.items()
            if len(digests) > 1
        ]


def _named(status: dict[str, Any]) -> str:
    return f"version {status['version']} {status['digest'][:6]}"


@contextmanager
def trial(target: Path, drafts: Sequence[Path], folder: Path) -> Iterator[Trial]:
    """Yield a trial whose servers have both got the first of the drafts."""
    os.environ[DRAFT_TOKEN_VARIABLE] = draft_server.TOKEN
    with ExitStack() as stack:
        urls = [stack.enter_context(draft_server.serving(target, drafts[0])) for _ in range(2)]
        made = Trial(target, drafts, urls, folder)
        stack.callback(made.close)
        code, text = made.push()
        assert code == 0, text
        yield made


def chosen(moments: list[Moment], count: int) -> list[Moment]:
    """Return so many moments from first to last; 0 for all."""
    if not count or count >= len(moments):
        return moments
    return [moments[index * (len(moments) - 1) // max(1, count - 1)] for index in range(count)]


def table(rows: list[Row]) -> Iterator[str]:
    """Yield a line for each kill, with its problems."""
    for row in rows:
        yield f"{row.moment}\n    {row.outcome}"
        yield from (f"    PROBLEM: {problem}" for problem in row.problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--statements", type=int, default=0)
    parser.add_argument(
        "--function", default="", help="statements of the functions whose name holds this alone"
    )
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafts", type=Path, nargs=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, drafts = options.target, options.drafts
        if target is None:
            target, drafts = made_here(folder)
        with trial(target, drafts, folder) as made:
            rows = []
            moments = [moment for moment in made.moments() if options.function in moment.statement[2]]
            print(f"{len(moments)} moments at which a push can be killed")
            for moment in chosen(moments, options.statements):
                rows.append(made.kill_at(moment))
                print("\n".join(table(rows[-1:])), flush=True)
    problems = sum(bool(row.problems) for row in rows)
    print(f"{len(rows)} kills, {problems} with a problem")
    return int(problems > 0)


def made_here(folder: Path) -> tuple[Path, list[Path]]:
    """Return a target and two drafts of one shape with other weights, made by runs of one step."""
    target = make_target(folder / "target")
    rows = launching.write_rows(folder / "rows.jsonl")
    drafts = []
    for seed in range(2):
        output = folder / f"run-{seed}"
        keys = {"target": target, "output": output, "data.path": rows, "train.steps": 1, "seed": seed}
        code, text = command("train", *(f"{key}={value}" for key, value in keys.items()))
        assert code == 0, text
        drafts.append(output / "draft")
    return target, drafts


if __name__ == "__main__":
    assert push_command  # imported before the forks
    sys.exit(main())
