"""Kills ``spec-trainer push`` at its statements between prepare and the last commit; prints what became of it.

    python -m tests.integration.killed_pushes                  # each state in which a server can find the pusher
    python -m tests.integration.killed_pushes --every          # each statement, the first and the last time
    python -m tests.integration.killed_pushes --statements 6

Two servers (``draft_server.py``) answer without a pause, and a process for each reads the stream of answers. The
statements are those that a whole push was seen to go through: in ``spec_kit.weight_sync``, in what asks servers,
and in the weight transports. Between two acts that another process can see (``ACTS``) a server cannot know where the
pusher has died, so the first statement after each act stands for those up to the next. The push does with one
server after the other what it does with both at once, as threads may come: so there are kills between two commits.

After each kill: what both servers serve, what ``spec-trainer serving`` says, and whether the next push is committed
everywhere. The last lines are the table of ``docs/weight-sync.md``. Exit code 1 where an answer was missing or wrong,
a version had two digests, ``serving`` said what is not so, or the next push failed.
"""

import argparse
import importlib
import json
import linecache
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import spec_kit.hosting
import spec_kit.weight_sync
import spec_weight_transports
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.weight_sync import push as push_module
from spec_trainer.cli import app as cli
from spec_trainer.cli.commands import push as push_command

from . import draft_server, launching
from .chaos import make_target

LIMIT_S = 120
"""Longest time of one command, on a machine that is busy with other things."""
WATCHED = tuple(
    str(Path(str(package.__file__)).parent)
    for package in (spec_kit.weight_sync, spec_kit.hosting, spec_weight_transports)
)
ACTS = {
    *(f"socket.{name}" for name in ("connect", "send", "sendall", "sendmsg", "shutdown", "close", "detach")),
    *("write", "unlink", "rename", "replace", "mkdir", "rmdir", "ftruncate"),
}
"""Functions in C by which a process does what others see."""
PHASES = (
    "before the first commit",
    "in the commit at the first server",
    "between the two commits",
    "in the commit at the second server",
    "after both commits",
)
"""Phases of a push, by how often ``Delivery.commit`` was entered and left."""

Statement = tuple[str, int, str]
"""File, line and function."""


class Tracer:
    """Sees each statement that this process executes while ``Push.run`` does, on all of its threads.

    ``reached`` gets it with the number of acts before, which are only counted where that is asked for, and with the
    phase.
    """

    def __init__(self, reached: Callable[[Statement, int, int], None], *, count_acts: bool = False) -> None:
        self._reached, self._is_pushing = reached, False
        self._lock = threading.Lock()
        self._acts, self._count_acts = 0, count_acts
        self._phase = 0

    def start(self) -> None:
        # In turn: the pool of a phase has one thread, whatever it is asked for.
        push_module.ThreadPoolExecutor = lambda workers, **options: ThreadPoolExecutor(1, **options)
        if self._count_acts:
            threading.setprofile(self._note_act)
            sys.setprofile(self._note_act)
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _note_act(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_return" and argument.__qualname__ in ACTS:
            with self._lock:
                self._acts += 1

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        if frame.f_code.co_qualname == "Push.run":
            self._is_pushing = True
        self._phase += frame.f_code.co_qualname == "Delivery.commit"
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if event == "return" and code.co_qualname == "Push.run":
            self._is_pushing = False
        self._phase += event == "return" and code.co_qualname == "Delivery.commit"
        if event == "line" and self._is_pushing:
            with self._lock:
                self._reached((code.co_filename, frame.f_lineno, code.co_qualname), self._acts, self._phase)
        return self._step


@dataclass(frozen=True)
class Moment:
    """The time at which a statement is about to be executed."""

    statement: Statement
    time: int
    """1 for the first."""
    acts: int
    """How many acts there were before."""
    phase: int

    def kill(self) -> None:
        """Kill this process then."""
        seen = 0

        def reached(statement: Statement, acts: int, phase: int) -> None:
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


def distinct(moments: list[Moment], *, every: bool) -> list[Moment]:
    """Return the first moment after each act; with ``every`` the first and the last time of each statement."""
    if not every:
        return [next(group) for _, group in groupby(moments, key=lambda moment: moment.acts)]
    last = {moment.statement: moment.time for moment in moments}
    return [moment for moment in moments if moment.time in (1, last[moment.statement])]


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


def summary(rows: list[Row]) -> Iterator[str]:
    """Yield a table of the kills, those in one line that have led to the same."""
    yield "| killed | the two servers serve | `serving` exits with | the next push | kills |"
    yield "|---|---|---|---|---|"
    yield from (
        f"{line} {count} |" for line, count in Counter(row.line for row in rows if row.killed).items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--statements", type=int, default=0)
    parser.add_argument("--every", action="store_true", help="each statement, the first and the last time")
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
            moments = distinct(made.moments(), every=options.every)
            moments = [moment for moment in moments if options.function in moment.statement[2]]
            print(f"{len(moments)} moments at which a push can be killed")
            for moment in chosen(moments, options.statements):
                rows.append(made.kill_at(moment))
                print("\n".join(table(rows[-1:])), flush=True)
    problems = sum(bool(row.problems) for row in rows)
    print(f"{len(rows)} kills, {problems} with a problem", *summary(rows), sep="\n")
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
