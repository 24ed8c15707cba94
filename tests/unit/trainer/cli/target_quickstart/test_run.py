"""From a target to a draft: one round, the same command again, a larger budget, and what is refused."""

import json
import time

import pytest

from spec_core.errors import ArtifactError, DataError, PluginNotFound, TargetError
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.cli.app import run
from spec_trainer.cli.target_quickstart import folder
from spec_trainer.cli.target_quickstart import run as quickstart
from spec_trainer.cli.target_quickstart.budget import ANSWERS, COST, PROMPTS, SHARES, StageTime, time_for
from spec_trainer.run.metrics import read_metrics

from .conftest import SECONDS


@pytest.fixture(autouse=True)
def enough_time(monkeypatch):
    """Prompts and answers end when enough are there, however slow the machine is."""
    given = {stage: StageTime(0.0, 600.0) for stage in (PROMPTS, ANSWERS)}
    monkeypatch.setattr(
        quickstart, "time_for", lambda stage, *rest: given.get(stage) or time_for(stage, *rest)
    )


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def question(row):
    return row["messages"][0]["content"]


def contents(root):
    return {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_rounds_go_on_from_one_another(request_of, data, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_LEAST_MORE_S", SECONDS)
    out = tmp_path / "out"
    summary = quickstart.run_target_quickstart(request_of(data=str(data)))
    first = out / "round-1"
    assert list(json.loads((first / "times.json").read_text())) == list(SHARES)
    held_out = {question(row) for row in rows_of(out / "held_out.jsonl")}
    asked = {question(row) for row in rows_of(first / "prompts.jsonl")}
    trained = rows_of(first / "training.jsonl")
    assert held_out
    assert asked
    assert not held_out & asked
    assert {question(row) for row in trained} <= asked
    assert all(row["messages"][-1]["role"] == "assistant" for row in trained)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["steps"] == read_metrics(first / "run/metrics.jsonl")[-1]["step"]
    assert summary["acceptance_length"] >= 1
    assert summary["prompts"]["held_out"] == len(held_out)
    assert str(first / "run/draft") in summary["serve"]["vllm"]
    card = (first / "run/draft/README.md").read_text()
    assert f"| all {len(held_out)} | 0 | {summary['greedy']['acceptance_length']:.2f} |" in card
    assert f"| draft tokens per round | {summary['served_draft_tokens']} |" in card
    report = (out / "report.html").read_text()
    assert f"of {data}; left out: 0 repeated, 0 unfinished, 0 unusable" in report
    assert "One answer at a time" in report
    assert any("too few steps" in warning for warning in summary["warnings"]) == (summary["steps"] < 100)

    before = contents(out)
    assert quickstart.run_target_quickstart(request_of(data=str(data))) == summary
    assert contents(out) == before

    more = quickstart.run_target_quickstart(request_of(data=str(data), budget_s=2 * SECONDS))
    second = out / "round-2"
    assert {path: before[path] for path in before if first in path.parents} == contents(first)
    assert [one["budget_s"] for one in more["rounds"]] == [SECONDS, SECONDS]
    assert f"init_from: {first / 'run/draft'}" in (second / "run/config.yaml").read_text()
    answered = {question(row) for row in trained}
    assert {question(row) for row in rows_of(second / "training.jsonl")} > answered
    assert not {question(row) for row in rows_of(second / "prompts.jsonl")} & (answered | held_out)
    assert more["draft"] == str(second / "run/draft")


def test_the_time_of_a_stopped_stage_is_missing_from_the_next_call(request_of, data, tmp_path, monkeypatch):
    budgets = []

    def noted(stage, budget_s, *rest):
        budgets.append(budget_s)
        return time_for(stage, budget_s, *rest)

    def stopped(*_):
        time.sleep(0.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart, "time_for", noted)
    monkeypatch.setattr(quickstart, "answer_round", stopped)
    for _ in range(3):
        with pytest.raises(Interrupted, match=rf"^interrupted; the same command goes on in {tmp_path}/out$"):
            quickstart.run_target_quickstart(request_of(data=str(data)))
    assert budgets[:3] == [SECONDS] * 3, "prompts, cost and answers of the first call"
    assert budgets[3] <= SECONDS - 0.5
    assert budgets[4] <= budgets[3] - 0.5
    assert len(budgets) == 5


def test_an_engine_that_starts_slowly_decodes_without_a_draft_while_it_runs(
    request_of, data, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(quickstart.Work, "starts_slowly", True)
    caplog.set_level("INFO")
    summary = quickstart.run_target_quickstart(request_of(data=str(data)))
    assert not (tmp_path / "out/breakdown.json").exists()
    logged = [record.getMessage() for record in caplog.records]
    (decoded,) = (place for place, line in enumerate(logged) if line.endswith("greedily without a draft"))
    stages = [place for place, line in enumerate(logged) if line.startswith("round-1: ")]
    assert stages[1] < decoded < stages[2], "in the stage of the cost, and nowhere else"
    plain = json.loads((tmp_path / "out/without_draft.json").read_text())
    assert len(plain["passes"]["greedy"]["answers"]) == summary["prompts"]["held_out"]
    assert summary["outputs_differing_share"] == 0
    (row,), (timed,) = summary["breakdown"]["rounds"], summary["throughput"]
    tau = summary["greedy"]["acceptance_length"]
    assert row["break_even"] == pytest.approx(
        tau * timed["tokens_per_s_without_draft"] / timed["tokens_per_s"]
    )
    assert summary["breakdown"]["verdict"] in (tmp_path / "out/report.html").read_text()


def test_answers_without_a_draft_are_shorter_if_the_time_is_short(request_of, data, tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart.Work, "starts_slowly", True)
    given = {PROMPTS: StageTime(0.0, 600.0), COST: StageTime(0.0, 0.0), ANSWERS: StageTime(0.0, 600.0)}
    monkeypatch.setattr(
        quickstart, "time_for", lambda stage, *rest: given.get(stage) or time_for(stage, *rest)
    )
    summary = quickstart.run_target_quickstart(request_of(data=str(data)))
    file = tmp_path / "out/without_draft.json"
    plain = json.loads(file.read_text())
    answers = plain["passes"]["greedy"]["answers"]
    assert max(len(answer["token_ids"]) for answer in answers) <= plain["max_new_tokens"] == 8
    assert summary["outputs_differing_share"] == 0, "with the draft, answers are as short"

    file.write_text("{")
    (tmp_path / "out/round-1/times.json").write_text(json.dumps({"prompts": 0.1, "cost": 0.1}))
    with pytest.raises(ArtifactError, match=r"without_draft.json is damaged; remove it"):
        quickstart.run_target_quickstart(request_of(data=str(data)))


def test_without_data_the_target_writes_the_prompts(request_of, tmp_path):
    summary = quickstart.run_target_quickstart(request_of())
    prompts = rows_of(tmp_path / "out/round-1/prompts.jsonl") + rows_of(tmp_path / "out/held_out.jsonl")
    assert len({question(row) for row in prompts}) == len(prompts) > 4
    assert summary["prompts"]["source"] == "the target itself"
    assert "Magpie, arXiv 2406.08464" in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"draft": "eagle"}, PluginNotFound, "no draft plugin is called"),
        ({"engine": "hff"}, PluginNotFound, "no engine plugin is called"),
        ({"target": "no/such/folder"}, TargetError, "is not a folder"),
        ({"data": "none.jsonl"}, DataError, "does not exist"),
    ],
)
def test_mistakes_are_found_before_anything_is_made(request_of, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        quickstart.run_target_quickstart(request_of(**options))
    assert not (tmp_path / "out").exists()


def test_an_output_among_the_data_is_refused(request_of, data, tmp_path):
    with pytest.raises(DataError, match="is in the data folder"):
        quickstart.run_target_quickstart(request_of(data=str(data.parent), output=data.parent / "out"))


def test_another_quickstarts_folder_is_refused(request_of, data, tmp_path):
    (tmp_path / "out").mkdir()
    work = quickstart.check_request(request_of(data=str(data)))
    work.folder.open(work.settings)
    with pytest.raises(ArtifactError, match="was begun with another data and seed; choose another output"):
        quickstart.run_target_quickstart(request_of(seed=1))


def test_a_folder_with_other_files_is_refused(request_of, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").touch()
    with pytest.raises(ArtifactError, match="is not empty and is no quickstart's; choose another"):
        quickstart.run_target_quickstart(request_of())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "x", "--budget", "soon"], "--budget='soon': expected a time of"),
        (["--budget", "10m"], "--data and --budget are for --target"),
        (["--data", "a.jsonl"], "--data and --budget are for --target"),
    ],
)
def test_wrong_options_end_with_one_line(words, message, capsys):
    assert run(["quickstart", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
