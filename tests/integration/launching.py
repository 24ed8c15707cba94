"""Tests of whole runs share this: the ``spec-trainer`` command as a process, seen from outside."""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import psutil

from spec_trainer.cli import app as cli

from ..distributions import write_distribution
from .run_directory import checkpoints, last_step
from .traps import Traps

START_S = 120.0
"""Longest time for a run to be up and training, on a machine that is busy with other things."""

STEPS = 120
"""Keys of a run that is taken to its end. The learning rate is constant: a shorter run has the same steps."""

MAX_TOKENS = 20

_STRANGER = """\
[spec_core.engines]
moody = stranger:MoodyEngine
exporting = exporting:ExportingEngine

[spec_core.backends]
limited = stranger:LimitedBackend

[spec_core.strategies]
guarded = stranger:GuardedStrategy
"""


def write_rows(file: Path) -> Path:
    """44 pre-tokenised samples of 4 to 20 tokens that count up; some without a supervised token, masks with holes."""
    draw = random.Random(0)
    with file.open("w") as rows:
        for number in range(44):
            length, first, pace = draw.randint(4, MAX_TOKENS), draw.randrange(97), draw.choice([1, 2])
            ids = [(first + pace * position) % 97 for position in range(length)]
            mask = [
                int(number % 11 != 0 and position > 1 and position % 7 != 0) for position in range(length)
            ]
            rows.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    return file


def write_stranger(folder: Path) -> str:
    """Installs ``stranger.py`` as a third party's distribution; returns the PYTHONPATH that finds it."""
    write_distribution(folder, "stranger", _STRANGER)
    return os.pathsep.join([str(folder), str(Path(__file__).parent / "stranger")])


@dataclass
class Lab:
    """Starts runs on one target and one data set, in a folder of traps, and leaves none of them behind."""

    folder: Path
    keys: dict[str, object]
    """Configuration that all runs share."""
    python_path: str
    runs: list[Run] = field(default_factory=list)

    one_and_two: ClassVar[dict[str, object]] = {"placement__kind": "disaggregated", "train__ranks": 2}

    @cached_property
    def traps(self) -> Traps:
        """The working directory of its runs."""
        return Traps.lay(self.folder / "traps")

    def _path(self) -> str:
        """Folders in which its runs look for packages: those that the tests inherit count, too."""
        paths = [str(self.traps.site), self.python_path, os.environ.get("PYTHONPATH")]
        return os.pathsep.join(filter(None, paths))

    def words(self, output: Path, **keys: object) -> list[str]:
        words = {**self.keys, "output": output, **{key.replace("__", "."): v for key, v in keys.items()}}
        return ["train", *(f"{key}={value}" for key, value in words.items())]

    def command(self, output: Path, command: str = "train", **keys: object) -> list[str]:
        return [*program(), command, *self.words(output, **keys)[1:]]

    def train_here(self, output: Path, **keys: object) -> None:
        """Train to a good end in this process, which has imported torch and transformers already."""
        assert cli.run(self.words(output, **keys)) == 0

    def start(self, output: Path, command: str = "train", **keys: object) -> Run:
        """Starts a run; ``train__steps=5`` is ``train.steps=5``."""
        marker = uuid.uuid4().hex
        errors = self.folder / f"{marker}.stderr"
        env = {**os.environ, "PYTHONPATH": self._path(), _MARKER: marker}
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                self.command(output, command, **keys),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=env,
                cwd=self.traps.directory,
                start_new_session=True,
            )
        self.runs.append(Run(process, output, errors, marker, last_step(output)))
        return self.runs[-1]

    def train(self, output: Path, timeout_s: float = 240, **keys: object) -> Run:
        """A run from start to a good end."""
        run = self.start(output, **keys)
        assert run.wait(timeout_s) == 0, run.story()
        self.traps.assert_untouched(program())
        return run

    def plan(self, **keys: object) -> subprocess.CompletedProcess[str]:
        words = self.command(self.folder / "planned", **keys)
        words[words.index("train")] = "plan"
        words.append("--json")
        env = {**os.environ, "PYTHONPATH": self._path()}
        here = self.traps.directory
        return subprocess.run(
            words, capture_output=True, text=True, timeout=START_S, check=False, env=env, cwd=here
        )

    def plan_words(self, **keys: object) -> list[str]:
        """Words of a plan as one document, for a call in the tests' own process."""
        return ["plan", *self.words(self.folder / "planned", **keys)[1:], "--json"]

    def sample_bytes(self, num_tokens: int) -> int:
        """Features and int64 ids of a sample."""
        with redirect_stdout(io.StringIO()) as document:
            assert cli.run(self.plan_words()) == 0
        return num_tokens * (json.loads(document.getvalue())["features_bytes_per_token"] + 8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for run in self.runs:
            run.kill_everything()
            run.process.wait()
        self.traps.assert_untouched(program())


_MARKER = "SPEC_TEST_RUN"
"""Environment variable by which every process that a run has started, and theirs, is found again."""


@dataclass(eq=False)
class Run:
    """One ``spec-trainer`` process under test."""

    process: subprocess.Popen[bytes]
    output: Path
    errors: Path
    marker: str
    first_step: int
    """Steps in metrics.jsonl when it was started."""

    def wait(self, timeout_s: float) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s\n{self.story()}") from None

    def until(self, condition: Callable[[], bool], timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            # Before the look, which then sees all that an ended one has done.
            has_ended = self.process.poll() is not None
            if condition():
                return
            assert not has_ended, f"ended early\n{self.story()}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s\n{self.story()}"
            time.sleep(0.02)

    def until_ready(self, who: str = "every process", times: int = 1) -> None:
        """Wait until every process is ready, or one of them has been so often."""
        self.until(lambda: self.errors.read_text().count(f"{who} is ready") >= times)

    def resumed_from(self) -> int:
        """Steps that it found done."""
        return int(re.findall(r"every process is ready; (\d+) steps are done", self.errors.read_text())[-1])

    def train_on(self, steps: int = 2) -> None:
        """Wait until this run, not an earlier one, has trained some steps."""
        self.until_ready()
        start = last_step(self.output)
        self.until(lambda: last_step(self.output) >= start + steps)

    def save_on(self) -> None:
        """Wait until it has written a checkpoint that was not there before."""
        before = checkpoints(self.output)
        self.until(lambda: bool(checkpoints(self.output) - before))

    def processes(self) -> list[psutil.Process]:
        """Everything that is left of it, zombies too."""
        return list(_marked(self.marker))

    def member(self, name: str) -> psutil.Process:
        """``engine-0``, ``trainer-1``, …"""
        for process in self.processes():
            with suppress(psutil.Error):
                if name in process.cmdline():
                    return process
        raise AssertionError(f"there is no {name}\n{self.story()}")

    def kill_everything(self) -> None:
        """Kill all that the run has started: vLLM overwrites the environment by which ``processes`` finds it."""
        descendants: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(self.process.pid).children(recursive=True)
        for process in {*self.processes(), *descendants}:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def last_line(self) -> str:
        return self.errors.read_text().splitlines()[-1]

    def story(self) -> str:
        """Return the output of its processes."""
        logs = [self.errors, *sorted((self.output / "logs").glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)


def until(condition: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.005)


def started(words: Sequence[str]) -> subprocess.Popen[str]:
    """A command line in a process of its own."""
    return subprocess.Popen([*program(), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def program() -> list[str]:
    """The first words of a command line."""
    script = Path(sys.executable).with_name("spec-trainer")
    if script.exists():
        return [str(script)]
    return [sys.executable, "-P", "-c", "from spec_trainer.cli.app import main; main()"]


@contextmanager
def running(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command as a process of its own, whose output is added to ``log``."""
    with log.open("ab") as output:
        process = subprocess.Popen([*program(), *words], stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _marked(marker: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARKER) == marker:
                yield process
