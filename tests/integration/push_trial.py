"""Two servers to which drafts are pushed by processes that are killed, and what the servers have then."""

import importlib
import json
import linecache
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.weight_sync import push as push_module
from spec_trainer.cli import app as cli

from . import draft_server
from .push_statements import Moment, Statement, Tracer

LIMIT_S = 120
"""Longest time of one command, on a machine that is busy with other things."""
PHASES = (
    "before the first commit",
    "in the commit at the first server",
    "between the two commits",
    "in the commit at the second server",
    "after both commits",
)
"""Phases of a push, by how often ``Delivery.commit`` was entered and left."""


@dataclass
class Row:
    """One kill of a pusher: the servers, ``serving`` and the next push after it."""

    moment: Moment
    killed: bool
    servers: list[str]
    drafts: str
    """Whether each server has the draft from before the push, or that of the push."""
    serving: int
    """Exit code of ``serving``."""
    next_push: int
    problems: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        how = "killed" if self.killed else "not reached"
        return f"{how}; {', '.join(self.servers)}; serving exits {self.serving}; next push exits {self.next_push}"

    @property
    def line(self) -> str:
        """The line of the table, but for the number of kills."""
        pushed = "is committed at both" if self.next_push == 0 else f"exits with {self.next_push}"
        return f"| {PHASES[self.moment.phase]} | {self.drafts} | {self.serving} | {pushed} |"


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
        """Return each time that a whole push comes to a statement, in order."""
        file = self._folder / "statements"

        def note(statement: Statement, acts: int, phase: int) -> None:
            with file.open("a") as notes:
                notes.write(json.dumps([*statement, acts, phase]) + "\n")

        code, text = self.push(Tracer(note, count_acts=True).start)
        assert code == 0, text
        linecache.clearcache()  # the lines that run are those of now
        times: dict[Statement, int] = {}
        moments = []
        for line in file.read_text().splitlines():
            *place, acts, phase = json.loads(line)
            statement = tuple(place)
            times[statement] = 1 + times.get(statement, 0)
            moments.append(Moment(statement, times[statement], acts, phase))
        return moments

    def kill_at(self, moment: Moment) -> Row:
        before = [len(stream.answers()) for stream in self._streams]
        served = [_named(self._settled(url)) for url in self._urls]
        killed, text = self.push(moment.kill)
        statuses = [self._settled(url) for url in self._urls]
        serving, said = command("serving", "--json", "--of", *self._urls)
        names = [_named(status) for status in statuses]
        drafts = ", ".join("old" if now == then else "new" for now, then in zip(names, served, strict=True))
        row = Row(moment, killed == -signal.SIGKILL, names, drafts, serving, 0)
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
        code, text = made.push(partial(note_modules, folder / "modules"))
        assert code == 0, text
        for module in (folder / "modules").read_text().split():  # else each fork imports them
            importlib.import_module(module)
        yield made


def note_modules(file: Path) -> None:
    """Let this process write the modules that it has imported when it ends ``Push.run``."""
    whole = push_module.Push.run

    def run(push: Any, *arguments: Any) -> None:
        whole(push, *arguments)
        own = ("spec_", "safetensors", "torch")
        file.write_text(" ".join(name for name in list(sys.modules) if name.startswith(own)))

    push_module.Push.run = run
