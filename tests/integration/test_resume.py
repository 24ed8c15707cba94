"""The same command again continues the run, whatever ended it, as if nothing had happened."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from spec_trainer.data import kept, row_encoder
from spec_trainer.training.checkpoint.folder import step_folders, step_of

from .launching import STEPS, Lab, Run
from .leftovers import assert_nothing_left, belongings
from .run_directory import (
    assert_bitwise_equal,
    assert_trained_exactly_once,
    losses,
    metrics,
    newest_checkpoint,
)

SAMPLES = range(40)


@pytest.fixture(scope="module")
def asked(lab: Lab) -> Path:
    """The directory of a run of one engine and two trainers that was asked to stop: by SIGTERM to all its processes,
    as a service manager sends it."""
    run = lab.start(lab.folder / "killed", **lab.one_and_two)
    run.train_on()
    for process in run.processes():
        process.terminate()
    _assert_saved(run)
    return run.output


@pytest.fixture(scope="module")
def killed(lab: Lab, asked: Path) -> tuple[Path, int]:
    """The directory of that run, started again and all its processes killed with -9 at once; its last checkpoint."""
    run = lab.start(asked, **lab.one_and_two)
    run.train_on()
    assert run.resumed_from() == run.first_step > 0
    run.save_on()
    run.train_on(1)
    run.kill_everything()
    assert run.process.wait() == -signal.SIGKILL
    return run.output, newest_checkpoint(run.output)


@pytest.mark.slow
def test_asked_to_stop_it_saves_and_exits_130(asked, uninterrupted) -> None:
    assert losses(asked) == losses(uninterrupted)[: len(losses(asked))]


@pytest.mark.slow
def test_a_run_killed_with_9_and_restarted_ends_bitwise_the_same(lab, killed, uninterrupted) -> None:
    """The newest checkpoint is damaged, and a trainer is killed before it is written again. ``test_faults`` has the
    same end after kills with -9 that leave a whole checkpoint."""
    output = _copy(lab, killed[0], "restarted")
    before, newest = sorted(step_folders(output / "checkpoints"), key=step_of)[-2:]
    (newest / "state" / "rank-0.safetensors").write_bytes(b"")
    keys = {"train__resume_from": "previous", "train__restarts": 6, "train__save_every": 1000}
    run = lab.start(output, **lab.one_and_two, **keys)
    run.until_ready()
    run.member("trainer-1").kill()
    assert run.wait(150) == 0, run.story()
    assert "(1 of train.restarts=6)" in run.errors.read_text()
    assert run.resumed_from() == step_of(before)
    assert losses(output) == losses(uninterrupted)
    assert_trained_exactly_once(output, SAMPLES)
    assert_bitwise_equal(output, uninterrupted, STEPS)


@pytest.mark.slow
def test_on_one_trainer_and_on_two_again_it_has_the_same_losses(lab, killed, uninterrupted) -> None:
    """SIGINT goes to the process group, as a terminal sends it."""
    folder, step = killed
    output = _copy(lab, folder, "one-trainer")
    run = lab.start(output, placement__kind="disaggregated", train__ranks=1)
    run.train_on(5)
    os.killpg(run.process.pid, signal.SIGINT)
    _assert_saved(run)
    assert losses(output)[:step] == losses(uninterrupted)[:step]
    lab.train(output, **lab.one_and_two, train__steps=newest_checkpoint(output) + 12)
    assert losses(output) == pytest.approx(losses(uninterrupted)[: len(losses(output))], rel=1e-5)
    assert_trained_exactly_once(output, SAMPLES)


@pytest.mark.slow
def test_no_collective_goes_to_the_default_group(lab, killed, uninterrupted) -> None:
    """Colocated; from a checkpoint to an evaluation, a checkpoint and an export, with c10d's default group closed.
    Eight micro-batches of a step share the two or three samples at the end of an epoch."""
    folder, step = killed
    output = _copy(lab, folder, "guarded")
    run = lab.train(
        output,
        placement__kind="colocated",
        train__ranks=2,
        strategy__name="guarded",
        train__accumulation=4,
        train__steps=step + 7,
        train__eval_every=step + 2,
    )
    for rank in range(2):
        log = (output / "logs" / f"trainer-{rank}.log").read_text()
        assert "forbidden: barrier without a group" in log, run.story()
        assert "the strategy is closed" in log, run.story()
    assert losses(output) == pytest.approx(losses(uninterrupted)[: step + 7], rel=1e-5)
    assert_trained_exactly_once(output, SAMPLES)
    assert "eval_loss" in metrics(output)[step + 1]
    assert newest_checkpoint(output) == step + 7
    assert (output / "draft" / "model.safetensors").exists()


@pytest.mark.slow
def test_asked_to_stop_before_the_first_step_it_stops(lab) -> None:
    run = lab.start(lab.folder / "early", **lab.one_and_two)
    run.until((run.output / "logs" / "trainer-1.log").exists)
    run.process.terminate()
    assert run.wait(60) == 130, run.story()
    assert run.last_line() == "spec-trainer: interrupted before the first step; the same command starts again"
    assert_nothing_left(run, belongings(run))


def test_a_resumed_run_takes_its_long_data_as_the_first_start_has_kept_it(lab, monkeypatch) -> None:
    monkeypatch.setattr(kept, "FEW_SAMPLES", 0)
    read: list[object] = []
    parse_row = row_encoder.parse_row
    monkeypatch.setattr(
        row_encoder, "parse_row", lambda row, *rest: read.append(row) or parse_row(row, *rest)
    )
    output, anew = lab.folder / "kept", lab.folder / "anew"
    lab.train_here(output, train__steps=2)
    once = len(read)
    lab.train_here(output, train__steps=4)
    assert len(read) == once > 0
    lab.train_here(anew, train__steps=4)
    assert len(read) == 2 * once
    assert losses(output) == losses(anew)


def _assert_saved(run: Run) -> None:
    assert run.wait(60) == 130, run.story()
    step = newest_checkpoint(run.output)
    assert step == metrics(run.output)[-1]["step"]
    folder = run.output / "checkpoints" / f"step-{step}"
    assert run.last_line() == f"spec-trainer: interrupted; saved {folder}; the same command continues there"
    assert not run.processes()


def _copy(lab: Lab, folder: Path, name: str) -> Path:
    return shutil.copytree(folder, lab.folder / name, symlinks=True)
