"""Wheels of every distribution, and an environment that has them instead of the working tree."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..made_once import made_once
from .environments import all_of_others, make_environment, run

ROOT = Path(__file__).parents[2]
THIRD_PARTIES = sorted(file.parent for file in ROOT.glob("tests/plugins/*/pyproject.toml"))


@pytest.fixture(scope="session", name="run")
def run_fixture() -> Callable[..., str]:
    return run


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return distribution name -> wheel, for this project's and the third parties'."""
    folder = made_once(tmp_path_factory, "wheels", _build_wheels)
    return {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in folder.glob("*.whl")}


@pytest.fixture(scope="session")
def clean_python(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment with the wheels installed.

    Everything of others (torch above all) is lent from this environment, and from one that lends to it, by links:
    nothing is downloaded, and the working tree is out of sight.
    """

    def make(folder: Path) -> None:
        python = make_environment(folder, all_of_others())
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, "--no-deps", "--no-index", *wheels.values())

    return made_once(tmp_path_factory, "environment", make) / "bin" / "python"


_BUILD = """
import os, sys
from hatchling.build import build_wheel
folder, *members = sys.argv[1:]
for member in members:
    os.chdir(member)
    build_wheel(folder)
"""


def _build_wheels(folder: Path) -> None:
    """Call what ``pip wheel`` calls, in one process for all: pip starts several for each."""
    members = sorted(file.parent for file in ROOT.glob("*/*/pyproject.toml"))
    run(sys.executable, "-c", _BUILD, folder, *members, *THIRD_PARTIES)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Return a file of 16 samples of 40 tokens each."""
    file = tmp_path / "rows.jsonl"
    ids = [[(7 * row + 3 * token) % 97 for token in range(40)] for row in range(16)]
    file.write_text("".join(json.dumps({"input_ids": one, "loss_mask": [1] * 40}) + "\n" for one in ids))
    return file


@pytest.fixture
def losses_of() -> Callable[[Path], list[float]]:
    """Return the losses in a run directory's metrics, in the order of its steps."""
    return lambda output: [
        json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture
def train(clean_python: Path, tiny_llama: Path, rows: Path, tmp_path: Path) -> Callable[..., Path]:
    """``train(*words)``: the run directory of a training in the clean environment."""

    def train(*words: object) -> Path:
        given = ("--target", tiny_llama, "--data", rows, "--output", tmp_path / "run")
        run(clean_python.with_name("spec-trainer"), *given, *words, cwd=tmp_path)
        return tmp_path / "run"

    return train
