"""Fixtures of the tests that run whole commands, in this process and as processes of their own."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from spec_trainer.cli.app import run

from . import launching
from .bad_input import tree

CommandLine = Callable[..., "Outcome"]

HERE = Path(__file__).parent
UNDISTURBED = "the undisturbed run"
LONGEST = (UNDISTURBED,)
"""Groups that take some minutes on one worker."""
OF_THE_UNDISTURBED_RUN = ("test_faults", "test_intruder", "test_ray_runs", "test_resume", "test_topologies")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Give the tests of a file or a folder one of several workers, so that what they share is made once; the same for
    the files that compare with the run that nothing disturbed. The longest groups begin first and the other groups
    next: short tests fill the end."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("xdist_group") is None:
            name = item.path.relative_to(HERE).with_suffix("").parts[0]
            group = UNDISTURBED if name in OF_THE_UNDISTURBED_RUN else name
            item.add_marker(pytest.mark.xdist_group(group))
    if config.getoption("loadgroup", False):
        items.sort(key=_place_among_workers)


def _place_among_workers(item: pytest.Item) -> int:
    marker = item.get_closest_marker("xdist_group")
    if marker is None:
        return len(LONGEST) + 1
    (group,) = marker.args
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command line."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of bad usage; fails the test if there is more or less than that."""
        assert (self.code, self.out) == (2, "")
        assert self.err.startswith("spec-trainer: error: "), self.err
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1, self.err
        return self.err.strip().removeprefix("spec-trainer: error: ")


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """``command_line("plan", "--target", folder)`` in this process."""

    def call(*words: object) -> Outcome:
        capsys.readouterr()
        code = run([str(word) for word in words])
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return call


@pytest.fixture(scope="session")
def peaked_target(make_target: Callable[..., Path]) -> Path:
    """A Llama with large weights: its next token is nearly certain, so a draft's loss falls fast."""
    return make_target("llama", initializer_range=0.6)


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 rows of 6 to 24 tokens of the language below, masks with holes."""
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return write_rows(file, [draw.randint(6, 24) for _ in range(40)])


def write_rows(file: Path, lengths: list[int]) -> Path:
    """Rows of a language in which each token has two successors, one of them four times in five; about every fifth
    token is not supervised."""
    draw = random.Random(1)
    successors = [draw.sample(range(3, 97), 2) for _ in range(97)]
    rows = []
    for length in lengths:
        ids = [draw.randrange(3, 97)]
        while len(ids) < length:
            ids.append(successors[ids[-1]][draw.random() < 0.2])
        rows.append({"input_ids": ids, "loss_mask": [int(draw.random() < 0.8) for _ in ids]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def lab(peaked_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[launching.Lab]:
    """Return a place to start runs as processes in; see launching.py."""
    folder = tmp_path_factory.mktemp("lab")
    keys = {
        "target": peaked_target,
        "data.path": launching.write_rows(folder / "rows.jsonl"),
        "train.steps": launching.STEPS,
        "train.schedule": "constant",
        "train.lr": 3e-3,
        "train.warmup_steps": 5,
        "train.global_batch_tokens": 96,
        "train.save_every": 5,
        "draft.num_steps": 3,
    }
    with launching.Lab(folder, keys, launching.write_stranger(folder / "stranger")) as lab:
        yield lab


@pytest.fixture(scope="session")
def uninterrupted(lab: launching.Lab) -> Path:
    """The directory of a run of one engine and two trainers that nothing disturbed."""
    output = lab.folder / "uninterrupted"
    lab.train(output, **lab.one_and_two)
    return output


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory of a command, empty, below a folder for files."""
    folder = tmp_path / "working-directory"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return tmp_path


@pytest.fixture
def refused(place, command_line, peaked_target, rows_file) -> Callable[..., str]:
    """``refused(*words, **flags)``: the one line that a command ends with, nothing created. Without ``target``,
    ``data`` and ``output``, good ones."""

    def call(*words: object, command: str = "train", **flags: object) -> str:
        flags = {"target": peaked_target, "data": rows_file, "output": place / "out"} | flags
        given = [word for key, value in flags.items() for word in (f"--{key}", value) if value is not None]
        before = tree(place)
        line = command_line(command, *given, *words).error
        assert tree(place) == before
        return line

    return call


@pytest.fixture
def file(place) -> Callable[[str, str | bytes], Path]:
    def write(name: str, content: str | bytes) -> Path:
        path = place / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write
