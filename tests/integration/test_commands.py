"""The commands, one after the other, as a person types them: train, resume, export, evaluate, and what they print."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from spec_trainer.cli.app import run
from spec_trainer.measure.evaluation.tables import evaluation_lines
from spec_trainer.training.checkpoint.folder import read_meta

from .launching import last_step, losses, metrics, started, until

STEPS = 12
PROMPTS = 5

METRICS = {
    "step", "epoch", "loss", "acceptance_length", "tokens", "samples", "tokens_per_s", "samples_per_s", "lr",
    "grad_norm", "time_data_s", "time_step_s", "tokens_max_over_mean", "cost_max_over_mean", "memory_host_bytes",
}  # fmt: skip
EVALUATION = {
    "acceptance_length_before", "acceptance_length", "acceptance_per_position", "drafted", "accepted", "rounds",
    "generated_tokens", "outputs_equal", "tokens_per_s", "tokens_per_s_without_draft",
}  # fmt: skip


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def trained(words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has ended. Do not change it: others look at it."""
    output = tmp_path_factory.mktemp("trained") / "run"
    assert run(words(output)) == 0
    return output


@pytest.fixture(scope="module")
def prompts(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first rows: each is answered with a draft and without one, greedily and sampled."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:PROMPTS]))
    return file


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run's directory, to go on with."""
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def summary(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text())


# --- what is printed --------------------------------------------------------------------------------------------


def test_light_commands_do_not_import_torch():
    """In one process, one after the other: what one of them had imported would stay."""
    light = [
        ["--help"], ["--version"], ["train", "--help"], ["plan", "--help"], ["plugins"],
        ["plugins", "--json"],
    ]  # fmt: skip
    code = (
        "import sys; from spec_trainer.cli.app import run\n"
        f"for command in {light!r}:\n"
        "    assert run(command) == 0, command\n"
        "    heavy = {'torch', 'transformers', 'datasets'} & sys.modules.keys()\n"
        "    assert not heavy, (command, heavy)\n"
        "    print('=====')\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (child.returncode, child.stderr) == (0, "")
    answers = child.stdout.split("=====\n")[:-1]
    assert len(answers) == len(light)
    assert all(answer.strip() for answer in answers)


def test_plugins_are_listed_with_what_the_design_asks_for(command_line):
    outcome = command_line("plugins", "--json")
    rows = json.loads(outcome.out)
    assert {(row["kind"], row["name"]) for row in rows} >= {
        ("backend", "cpu"), ("draft", "eagle3"), ("engine", "hf"), ("strategy", "fsdp")
    }  # fmt: skip
    for row in rows:
        assert row.keys() == {
            "kind", "name", "distribution", "version", "api", "status", "reason"
        }  # fmt: skip
    assert all(row["status"] == "ok" and row["api"] == 1 for row in rows if row["name"] == "cpu")
    assert "eagle3" in command_line("plugins").out


def test_plan_is_one_document_and_creates_nothing(command_line, words, tmp_path):
    outcome = command_line("plan", *words(tmp_path / "out"), "--json")
    document = json.loads(outcome.out)
    assert outcome.code == 0
    assert (document["draft"], document["steps"], document["placement"]) == ("eagle3", STEPS, "inline")
    assert document["samples"] + document["held_out_samples"] == 40
    assert document["processes"] == ["this process: engine hf and trainer rank 0 (fsdp), backend cpu"]
    assert not (tmp_path / "out").exists()
    assert "placement: inline" in command_line("plan", *words(tmp_path / "out")).out


def test_plan_refuses_a_draft_that_an_installed_engine_is_too_old_for(
    command_line, words, tmp_path, monkeypatch
):
    given = words(tmp_path / "out")
    without = json.loads(command_line("plan", *given, "--json").out)
    assert list(without["served_by"]) == ["sglang", "vllm"]
    read_version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.25.0" if name == "vllm" else read_version(name))
    refused = command_line("plan", *given)
    assert refused.error.startswith("no engine that is installed here serves draft eagle3 with")
    assert "vllm 0.25.0 is installed, this engine works with >=0.26,<0.34; pip install" in refused.error
    elsewhere = json.loads(command_line("plan", *given, "--serve-elsewhere", "--json").out)
    (warning,) = [text for text in elsewhere["warnings"] if "no engine that is installed here" in text]
    assert warning in refused.error
    assert "--serve-elsewhere" not in warning
    assert elsewhere["served_by"]["vllm"].endswith("pip install 'vllm>=0.26,<0.34'")


def test_plan_names_every_process(command_line, words, tmp_path):
    kind = ["placement.kind=disaggregated", "train.ranks=2", "engine.replicas=3"]
    processes = json.loads(command_line("plan", *words(tmp_path / "out", *kind), "--json").out)["processes"]
    assert len(processes) == 5
    assert sum("trainer" in line for line in processes) == 2


def test_logs_go_to_stderr_and_the_document_to_stdout(trained, peaked_target, prompts):
    """The real program: stdout is one JSON document whatever libraries have to say."""
    child = _finished(
        ["evaluate", "--target", str(peaked_target), "--draft-model", str(trained / "draft"),
         "--prompts", str(prompts), "--max-new-tokens", "2", "--temperature", "0", "--json"]
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert isinstance(json.loads(child.stdout), dict)


# --- a run and what it leaves -----------------------------------------------------------------------------------


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


# --- going on ---------------------------------------------------------------------------------------------------


def test_same_command_again_trains_nothing_and_keeps_the_summary(words, trained, copied):
    assert run(words(copied)) == 0
    assert metrics(copied) == metrics(trained)
    before = json.loads((trained / "summary.json").read_text().replace(str(trained), str(copied)))
    assert summary(copied) == before
    assert _draft(copied) == _draft(trained)


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
    assert _draft(again) == _draft(trained)


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
    assert _draft(broken) == _draft(whole)


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
    broken = _with_nan(shutil.copytree(peaked_target, tmp_path / "target"))
    outcome = command_line(*words(tmp_path / "out", f"target={broken}"))
    assert outcome.code == 1
    assert f"before any weight has changed: target {broken}, its features or" in outcome.err
    assert "train.lr" not in outcome.err


def test_a_draft_that_is_not_finite_is_not_evaluated(command_line, trained, tmp_path, peaked_target, prompts):
    draft = _with_nan(shutil.copytree(trained / "draft", tmp_path / "draft"))
    asked = ("--target", peaked_target, "--prompts", prompts)
    line = command_line("evaluate", "--draft-model", draft, *asked).error
    assert line.startswith(f"draft {draft}: ")
    assert "holds values that are not finite" in line


def test_tensorboard_gets_the_scalars(words, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    assert run(words(tmp_path / "out", "track.tensorboard=true", "train.steps=2")) == 0
    assert list((tmp_path / "out" / "tensorboard").glob("events.*"))


# --- drafts -----------------------------------------------------------------------------------------------------


def test_exported_checkpoint_is_the_runs_draft_bit_for_bit(command_line, trained, tmp_path, peaked_target):
    output = tmp_path / "drafts" / "one"
    outcome = command_line("export", "--checkpoint", trained / "checkpoints" / "step-12", "--output", output)
    assert (outcome.code, outcome.err) == (0, "")
    first, length, *serve = outcome.out.splitlines()
    assert first == f"draft: {output}"
    assert length.startswith("acceptance length (tau): ")
    assert [line for line in serve if line.startswith("serve it")] == [
        f"serve it with {engine}:" for engine in ("sglang", "vllm")
    ]
    commands = [shlex.split(line) for line in serve if line.startswith("  ")]
    assert [command[:3] for command in commands] == [
        ["python", "-m", "sglang.launch_server"],
        ["vllm", "serve", str(peaked_target)],
    ]
    assert all(str(output) in " ".join(command) for command in commands)
    assert _files(output) == _files(trained / "draft")
    again = command_line("export", "--checkpoint", trained / "checkpoints" / "step-12", "--output", output)
    assert again.error == f"output {output} exists; choose a new folder"


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("state/rank-0.safetensors", "flipped"),
        ("state/index.json", "cut"),
        ("meta.json", "cut"),
        ("config.yaml", "flipped"),
    ],
)
def test_damage_in_a_checkpoint_is_noticed_by_export_and_resume(command_line, copied, words, file, damage):
    checkpoint = copied / "checkpoints" / "step-12"
    path = checkpoint / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[:20] if damage == "cut" else content)
    line = command_line("export", "--checkpoint", checkpoint, "--output", copied / "new").error
    assert str(path) in line
    assert not (copied / "new").exists()
    line = command_line(*words(copied)).error
    assert str(path) in line
    assert line.endswith(f"go on from step-10 with --resume-from previous, or delete {checkpoint}")


def test_the_checkpoint_before_a_damaged_one_is_resumed_on_demand(command_line, copied, trained, words):
    last = copied / "checkpoints" / "step-12"
    (last / "state" / "rank-0.safetensors").write_bytes(b"")
    assert command_line(*words(copied), "--resume-from", "previous").code == 0
    assert losses(copied) == losses(trained)
    assert _files(last / "state") == _files(trained / "checkpoints" / "step-12" / "state")
    assert _draft(copied) == _draft(trained)
    assert "resume_from: latest" in (copied / "config.yaml").read_text()
    assert command_line(*words(copied)).code == 0


def test_export_below_a_file_is_refused(command_line, trained, rows_file):
    checkpoint = trained / "checkpoints" / "step-12"
    line = command_line("export", "--checkpoint", checkpoint, "--output", rows_file / "draft").error
    assert "is not a folder that can be written to" in line


def test_export_after_the_target_has_changed_is_refused(command_line, trained, tmp_path, make_target):
    words = ("export", "--checkpoint", trained / "checkpoints" / "step-12", "--output", tmp_path / "draft")
    assert "has changed since" in command_line(*words, "--target", make_target("llama")).error


def test_export_says_that_another_version_may_have_computed_the_digest(command_line, copied, tmp_path):
    checkpoint = copied / "checkpoints" / "step-12"
    meta = read_meta(checkpoint)
    before = meta.model_copy(update={"target_digest": "0123456789abcdef" * 4})
    (checkpoint / "meta.json").write_text(before.to_json())
    line = command_line("export", "--checkpoint", checkpoint, "--output", tmp_path / "draft").error
    assert f"has digest {meta.target_digest[:12]}" in line
    assert "trained on a target of digest 0123456789ab" in line
    assert "or another version of spec-trainer wrote the checkpoint" in line


def test_export_finds_a_target_that_was_moved(command_line, trained, tmp_path, peaked_target):
    moved = shutil.copytree(peaked_target, tmp_path / "moved")
    words = ("export", "--checkpoint", trained / "checkpoints" / "step-12", "--output", tmp_path / "draft")
    assert command_line(*words, "--target", moved).code == 0
    exported, own = _files(tmp_path / "draft"), _files(trained / "draft")
    card = exported.pop("README.md").replace(b"draft for moved", f"draft for {peaked_target.name}".encode())
    assert card == own.pop("README.md")
    assert exported == own


def test_evaluation_of_the_draft(command_line, trained, peaked_target, prompts):
    outcome = command_line(
        "evaluate", "--target", peaked_target, "--draft-model", trained / "draft", "--prompts", prompts,
        "--max-new-tokens", 12, "--num-draft-tokens", 2, "--json",
    )  # fmt: skip
    document = json.loads(outcome.out)
    assert document.keys() >= EVALUATION
    assert document["outputs_equal"] is True
    assert document["acceptance_length"] == pytest.approx(1 + document["accepted"] / document["rounds"])
    assert len(document["acceptance_per_position"]) == 2
    assert document["drafted"] <= 2 * document["rounds"]
    assert 0 < document["generated_tokens"] <= 12 * PROMPTS
    assert document["inputs"] == {}, "no prompt has an image"


@pytest.mark.parametrize(("trained_one", "loads"), [(True, "1,4"), (False, "2")], ids=["trained", "drawn"])
def test_breakdown_of_rounds(command_line, trained, peaked_target, prompts, trained_one, loads):
    draft = ("--draft-model", trained / "draft") if trained_one else ("--draft", "eagle3")
    words = ("evaluate", "--breakdown", "--target", peaked_target, *draft, "--prompts", prompts)
    outcome = command_line(
        *words, "--max-new-tokens", 6, "--num-draft-tokens", 3, "--concurrency", loads, "--json"
    )
    document = json.loads(outcome.out)
    assert [part["concurrency"] for part in document["breakdown"]] == [int(load) for load in loads.split(",")]
    for part in document["breakdown"]:
        assert [row["num_draft_tokens"] for row in part["rounds"]] == [1, 2, 3]
        for row in part["rounds"]:
            assert row["break_even"] == pytest.approx(row["round_ms"] / part["token_ms"])
            assert row["target_ms"] > 0
            assert row["acceptance_length"] >= 1


def test_numbers_of_draft_tokens_are_compared_at_each_load(
    command_line, trained, peaked_target, prompts, tmp_path
):
    outcome = command_line(
        "evaluate", "--target", peaked_target, "--draft-model", trained / "draft", "--prompts", prompts,
        "--max-new-tokens", 6, "--num-draft-tokens", "1,3", "--concurrency", "1,4", "--json",
        "--report", tmp_path / "report.html",
    )  # fmt: skip
    document = json.loads(outcome.out)
    sweep = document["sweep"]
    for load, entry in zip(sweep["loads"], document["throughput"], strict=True):
        speedups = {row["num_draft_tokens"]: row["speedup"] for row in load["numbers"]} | {0: 1.0}
        assert speedups.keys() == {0, 1, 3}
        assert load["speedup"] == max(speedups.values()) == speedups[load["fastest"]]
        assert entry["speedup"] == speedups[document["num_draft_tokens"]], "the figures are the best number's"
    assert len(document["acceptance_per_position"]) == document["num_draft_tokens"]
    assert document["outputs_equal"] is True
    assert sweep["gain"] >= 0
    assert "Draft tokens by load" in (tmp_path / "report.html").read_text()


def test_evaluation_of_everything_that_can_be_asked_for(
    command_line, trained, peaked_target, prompts, caplog, tmp_path
):
    outcome = command_line(
        "evaluate", "--target", peaked_target, "--draft-model", trained / "draft", "--prompts", prompts,
        "--max-new-tokens", 6, "--temperature", 0.7, "--no-stop-at-eos", "--concurrency", "3,8", "--no-untrained",
        "engine.dtype=float32", "--json", "--report", tmp_path / "report.html",
    )  # fmt: skip
    document = json.loads(outcome.out)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4
    assert not re.search(r"<script|<link|src=|url\(http", page)
    assert "the draft " in page
    assert (document["engine"], document["backend"], document["prompts"]) == ("hf", "cpu", PROMPTS)
    assert (document["num_draft_tokens"], document["temperature"]) == (2, 0.7)
    assert document["acceptance_length_before"] is None
    assert document["generated_tokens"] == document["greedy"]["generated_tokens"] == 6 * PROMPTS
    assert document["sampled"].items() <= document.items()
    assert document["outputs_equal"] is True
    assert document["first_differences"] == []
    assert [entry["concurrency"] for entry in document["throughput"]] == [3, 8]
    assert all(
        entry["speedup"] == entry["tokens_per_s"] / entry["tokens_per_s_without_draft"]
        for entry in document["throughput"]
    )
    assert "timing answers at concurrency 3 with a draft (tokens of a round: 2)" in caplog.text


def test_figures_are_printed_also_where_the_report_cannot_be_written(
    command_line, trained, peaked_target, prompts, tmp_path
):
    outcome = command_line(
        "evaluate", "--target", peaked_target, "--draft-model", trained / "draft", "--prompts", prompts,
        "--max-new-tokens", 2, "--temperature", 0, "--no-untrained", "--json", "--report", "/dev/full",
    )  # fmt: skip
    assert outcome.code == 1
    assert "No space left on device" in outcome.err
    assert json.loads(outcome.out)["prompts"] == PROMPTS


def test_evaluation_measures_greedy_and_sampled_answers(command_line, trained, peaked_target, prompts):
    flags = ["--target", peaked_target, "--draft-model", trained / "draft", "--prompts", prompts, "--json"]
    both = json.loads(command_line("evaluate", *flags, "--max-new-tokens", 3).out)
    assert both["acceptance_length_before"] is None
    assert (both["temperature"], both["sampled"]["temperature"]) == (0.0, 1.0)
    assert both["greedy"].items() <= both.items()
    greedy = ["--max-new-tokens", 3, "--temperature", 0, "--untrained"]
    alone = json.loads(command_line("evaluate", *flags, *greedy).out)
    assert alone["sampled"] is None
    assert alone["acceptance_length_before"] >= 1
    assert {key: alone[key] for key in ("rounds", "drafted", "accepted", "acceptance_per_position")} == {
        key: both[key] for key in ("rounds", "drafted", "accepted", "acceptance_per_position")
    }


def test_evaluation_on_benchmarks(command_line, trained, peaked_target, add_characters, tmp_path):
    """A second question comes after the answer to the first; each benchmark has its row, and all have a total."""
    target, data = shutil.copytree(peaked_target, tmp_path / "target"), tmp_path / "data"
    add_characters(target)
    data.mkdir()
    (data / "mt_bench.jsonl").write_text(json.dumps({"turns": ["Who is it?", "Why?"]}) + "\n")
    (data / "mbpp.jsonl").write_text((json.dumps({"prompt": "Add a to b."}) + "\n") * 3)
    asked = ["--bench", "mt_bench,mbpp:2", "--bench-data", data, "--max-new-tokens", 12, "--temperature", 0]
    words = ["evaluate", "--target", target, "--draft-model", trained / "draft", *asked, "--no-untrained"]
    document = json.loads(command_line(*words, "--json").out)
    rows = document["benchmarks"]
    assert {name: row["prompts"] for name, row in rows.items()} == {"mt_bench": 2, "mbpp": 2}
    for key in ("rounds", "accepted", "generated_tokens"):
        assert document[key] == sum(row[key] for row in rows.values()), key
    per_request = [row["acceptance_length_per_request"] for row in rows.values()]
    assert document["acceptance_length_per_request"] == pytest.approx(sum(per_request) / 2)
    assert "mbpp: too few generated tokens: 24, 5000 or more are advised" in document["warnings"]
    lines = "\n".join(evaluation_lines(document)).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("benchmark"))
    assert [line.split()[0] for line in lines[first : first + 4]] == [
        "benchmark",
        "mt_bench",
        "mbpp",
        "total",
    ]
    assert [line for line in lines if line.startswith("serve it")] == [
        "serve it with sglang:",
        "serve it with vllm:",
    ]
    assert command_line(*words, "--prompts", data / "mbpp.jsonl").error.startswith("--prompts=")


def test_init_from_continues_with_the_draft(words, trained, tmp_path):
    """A step that moves nothing: the held-out loss is that of the draft that it began with, although the held-out
    samples now come one by one."""
    output = tmp_path / "out"
    frozen = ["train.steps=1", "train.lr=1e-30", "train.global_batch_tokens=1"]
    assert run(words(output, f"draft.init_from={trained / 'draft'}", *frozen)) == 0
    assert summary(output)["eval_loss"] == pytest.approx(summary(trained)["eval_loss"], rel=1e-6)


def _draft(output: Path) -> bytes:
    return (output / "draft" / "model.safetensors").read_bytes()


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _finished(words: list[str]) -> subprocess.CompletedProcess[str]:
    with started(words) as child:
        out, err = child.communicate(timeout=90)
    return subprocess.CompletedProcess(words, child.returncode, out, err)


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


def _with_nan(folder: Path) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel() * tensors[name].is_floating_point())
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
