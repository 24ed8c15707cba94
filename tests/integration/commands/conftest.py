"""A run that has ended, for the commands that look at it or go on from it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spec_trainer.cli.app import run

STEPS = 12


@pytest.fixture(scope="session")
def words(peaked_target: Path, rows_file: Path) -> Callable[..., list[str]]:
    """``words(output, *overrides)``: a good command line, 12 steps, a checkpoint after each five."""

    def build(output: Path, *overrides: str) -> list[str]:
        flags = ["--target", str(peaked_target), "--data", str(rows_file), "--output", str(output)]
        keys = {
            "train.steps": STEPS, "train.lr": 3e-3, "train.warmup_steps": 2,
            "train.global_batch_tokens": 128, "train.save_every": 5, "train.eval_every": 6,
            "draft.num_steps": 2,
        }  # fmt: skip
        return [*flags, *(f"{key}={value}" for key, value in keys.items()), *overrides]

    return build


@pytest.fixture(scope="session")
def trained(words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has ended. Do not change it: others look at it."""
    output = tmp_path_factory.mktemp("trained") / "run"
    assert run(words(output)) == 0
    return output


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run's directory, to go on with."""
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)
