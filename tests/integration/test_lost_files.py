"""A run loses what it has written: it ends, says so, and puts nothing where its directory was."""

import json
import shutil
from pathlib import Path

import pytest

from spec_trainer.base.progress import StepProgress

from . import run_directory
from .leftovers import EXTRA_S, assert_fails, belongings

PROFILED = [1, 2, 3]


@pytest.mark.slow
def test_directory_of_two_trainers(lab) -> None:
    """One of the two profiles: both would write the same files."""
    output = lab.folder / "removed"
    run = lab.start(output, **lab.one_and_two, profile__steps=PROFILED)
    run.train_on(1 + max(PROFILED))
    for step in PROFILED:
        assert json.loads((output / f"profile-step-{step}.json").read_text())["traceEvents"]
    held = belongings(run)
    output.rename(lab.folder / "elsewhere")
    assert_fails(run, held, str(output), within_s=EXTRA_S)
    assert not output.exists()


@pytest.fixture
def words(peaked_target: Path, rows_file: Path, tmp_path: Path) -> list[object]:
    """A run of this process."""
    return [
        "train", "--target", peaked_target, "--data", rows_file, "--output", tmp_path / "run",
        "train.steps=3",
    ]  # fmt: skip


def test_directory_of_one_process(command_line, words, tmp_path, monkeypatch) -> None:
    output, show = tmp_path / "run", StepProgress.show

    def show_and_remove(progress: StepProgress, record: dict[str, int]) -> None:
        show(progress, record)
        if record["step"] == 2:
            shutil.rmtree(output)

    monkeypatch.setattr(StepProgress, "show", show_and_remove)
    outcome = command_line(*words)
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1] == (
        f"spec-trainer: error: output {output} was removed or replaced while this run was under way"
    )
    assert not output.exists()


def test_records_of_a_finished_run(command_line, words, tmp_path) -> None:
    """Its checkpoints are all that it needs to be exported again."""
    output = tmp_path / "run"
    assert command_line(*words).code == 0
    weights = (output / "draft" / "model.safetensors").read_bytes()
    (output / "metrics.jsonl").unlink()
    (output / "summary.json").unlink()
    shutil.rmtree(output / "draft")
    assert command_line(*words).code == 0
    assert run_directory.summary(output)["steps"] == 3
    assert (output / "draft" / "model.safetensors").read_bytes() == weights
