"""Runs: the files that they leave, how they go on when the command is given again, and what ends them."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from spec_trainer.cli.app import run

from ..launching import started, until
from ..run_directory import draft_weights, last_step, losses, metrics, summary
from .broken_models import with_nan
from .conftest import STEPS

METRICS = {
    "step", "epoch", "loss", "acceptance_length", "tokens", "samples", "tokens_per_s", "samples_per_s", "lr",
    "grad_norm", "time_data_s", "time_step_s", "tokens_max_over_mean", "cost_max_over_mean", "memory_host_bytes",
}  # fmt: skip


def test_run_directory_has_what_the_design_lists(trained):
    assert {path.name for path in trained.iterdir() if not path.name.startswith(".")} == {
        "config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "draft", "report.html", "logs"
    }  # fmt: skip
    retained = {path.name for path in (trained / "checkpoints").iterdir()}
    best = (trained / "checkpoints" / "best").resolve().name
    assert retained == {"best", "step-10", "step-12", best}
    assert {path.name for path in trained.rglob(".*")} == {".identity", ".lock"}


def test_metrics_have_one_object_for_every_step(trained):
    records = metrics(trained)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record.keys() >= METRICS for record in records)
    assert [record["step"] for record in records if "eval_loss" in record] == [6, 12]
    assert records[-1]["eval_acceptance_length"] > 1
    assert all(0 < record["tokens"] <= 128 and record["grad_norm"] > 0 for record in records)
    assert records[-1]["loss"] < records[0]["loss"]


def test_best_checkpoint_is_the_one_with_the_longest_held_out_acceptance(trained):
    scores = {r["step"]: r["eval_acceptance_length"] for r in metrics(trained) if "eval_loss" in r}
    best = (trained / "checkpoints" / "best").resolve()
    assert best.name == f"step-{max(scores, key=scores.__getitem__)}"
    assert json.loads((best / "meta.json").read_text())["acceptance_length"] == max(scores.values())


def test_summary_tells_the_end_of_the_run(trained):
    document, last = summary(trained), metrics(trained)[-1]
    assert document["steps"] == STEPS
    assert document["loss"] == last["loss"]
    assert document["eval_acceptance_length"] == last["eval_acceptance_length"]
    assert document["tokens"] == sum(record["tokens"] for record in metrics(trained))
    assert document["wall_s"] == pytest.approx(sum(document["time_s"].values()), rel=0.05)


def test_report_is_self_contained(trained):
    page = (trained / "report.html").read_text()
    assert page.count("<svg") >= 2
    assert "global_batch_tokens: 128" in page
    for outside in ("<script", "<link", "<img", "src=", "@import"):
        assert outside not in page


def test_same_command_again_trains_nothing_and_keeps_the_summary(words, trained, copied):
    assert run(words(copied)) == 0
    assert metrics(copied) == metrics(trained)
    before = json.loads((trained / "summary.json").read_text().replace(str(trained), str(copied)))
    assert summary(copied) == before
    assert draft_weights(copied) == draft_weights(trained)


def test_summary_comes_back_from_metrics(words, trained, copied):
    (copied / "summary.json").unlink()
    assert run(words(copied)) == 0
    for key in ("steps", "loss", "tokens", "eval_loss", "simulated_acceptance_length"):
        assert summary(copied)[key] == summary(trained)[key]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_more_steps_go_on_where_the_run_ended(words, trained, copied):
    assert run(words(copied, f"train.steps={STEPS + 3}", f"profile.steps=[{STEPS}]")) == 0
    assert json.loads((copied / f"profile-step-{STEPS}.json").read_text())["traceEvents"]
    assert metrics(copied)[:STEPS] == metrics(trained)
    assert [record["step"] for record in metrics(copied)[STEPS:]] == [13, 14, 15]
    assert summary(copied)["steps"] == STEPS + 3


def test_lines_of_a_crashed_run_are_dropped(words, copied):
    """It had gone on to step 14 and was cut in the middle of a line, without a checkpoint."""
    with (copied / "metrics.jsonl").open("a") as file:
        for step in (13, 14):
            file.write(json.dumps({**metrics(copied)[-1], "step": step, "loss": 777.0}) + "\n")
        file.write('{"step": 15, "lo')
    assert run(words(copied, f"train.steps={STEPS + 1}")) == 0
    assert [record["step"] for record in metrics(copied)] == list(range(1, STEPS + 2))
    assert all(record["loss"] < 700 for record in metrics(copied))


@pytest.mark.parametrize("word", ["train.lr=1e-3", "seed=1", "draft.num_steps=3", "data.max_length=16"])
def test_another_run_in_the_same_directory_is_refused(command_line, words, trained, word):
    assert "belongs to another run" in command_line(*words(trained, word)).error


def test_what_is_no_part_of_the_identity_may_change(words, copied):
    assert run(words(copied, "train.save_every=7", "timeouts.step_s=60", "train.accumulation=2")) == 0


def test_config_of_the_run_alone_reproduces_it(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["--config", str(trained / "config.yaml"), "--output", "again"]) == 0
    again = tmp_path / "again"
    assert losses(again) == losses(trained)
    assert draft_weights(again) == draft_weights(trained)


def test_relative_paths_hold_from_any_working_directory(
    words, tmp_path, monkeypatch, peaked_target, rows_file, command_line
):
    monkeypatch.chdir(rows_file.parent)
    target = os.path.relpath(peaked_target)
    assert (
        run(words(tmp_path / "out", f"target={target}", f"data.path={rows_file.name}", "train.steps=1")) == 0
    )
    (tmp_path / "deeper" / "down").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deeper" / "down")
    exported = command_line("export", "--checkpoint", "../../out/checkpoints/step-1", "--output", "draft")
    assert (exported.code, exported.out.splitlines()[0]) == (0, "draft: draft")


@pytest.fixture
def signals_by_default():
    """A shell's background job ignores SIGINT, one under nohup SIGHUP, and children inherit that."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("signals_by_default")
def test_resumed_run_ends_bitwise_equal_after_sigint_and_sighup(words, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    steps = "train.steps=120"
    assert run(words(whole, steps)) == 0
    for number in (signal.SIGINT, signal.SIGHUP):
        child, step = _interrupted(words(broken, steps), broken, number)
        assert child.returncode == 130, child.stderr
        folder = broken / "checkpoints" / f"step-{step}"
        line = child.stderr.splitlines()[-1]
        assert line == f"spec-trainer: interrupted; saved {folder}; the same command continues there"
        assert step < 120
        assert not (broken / "summary.json").exists()
    assert run(words(broken, steps)) == 0
    assert losses(broken) == losses(whole)
    assert draft_weights(broken) == draft_weights(whole)


def test_loss_that_is_not_finite_ends_the_run_before_a_checkpoint(command_line, words, tmp_path):
    outcome = command_line(*words(tmp_path / "out", "train.lr=1e30", "train.save_every=1"))
    assert outcome.code == 1
    assert "nan" in outcome.err
    assert "step-" in outcome.err
    assert "holds the weights that gave this, an earlier one may be sound: lower train.lr" in outcome.err
    steps = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert f"step-{len(metrics(tmp_path / 'out'))}" in steps
    assert len(metrics(tmp_path / "out")) < STEPS


def test_a_target_that_is_not_finite_is_not_blamed_on_the_learning_rate(
    command_line, words, tmp_path, peaked_target
):
    broken = with_nan(shutil.copytree(peaked_target, tmp_path / "target"))
    outcome = command_line(*words(tmp_path / "out", f"target={broken}"))
    assert outcome.code == 1
    assert f"before any weight has changed: target {broken}, its features or" in outcome.err
    assert "train.lr" not in outcome.err


def test_tensorboard_gets_the_scalars(words, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    assert run(words(tmp_path / "out", "track.tensorboard=true", "train.steps=2")) == 0
    assert list((tmp_path / "out" / "tensorboard").glob("events.*"))


def test_init_from_continues_with_the_draft(words, trained, tmp_path):
    """A step that moves nothing: the held-out loss is that of the draft that it began with, although the held-out
    samples now come one by one."""
    output = tmp_path / "out"
    frozen = ["train.steps=1", "train.lr=1e-30", "train.global_batch_tokens=1"]
    assert run(words(output, f"draft.init_from={trained / 'draft'}", *frozen)) == 0
    assert summary(output)["eval_loss"] == pytest.approx(summary(trained)["eval_loss"], rel=1e-6)


def _interrupted(
    words: list[str], output: Path, number: signal.Signals
) -> tuple[subprocess.CompletedProcess[str], int]:
    """Signals the run once it has trained three more steps; the step that it ended with."""
    before = last_step(output)
    child = started(words)
    try:
        until(lambda: child.poll() is not None or last_step(output) >= before + 3, 120)
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    done = subprocess.CompletedProcess(words, child.returncode, out, err)
    return done, last_step(output)
