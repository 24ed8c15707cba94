"""The figures, sweeps, breakdowns, benchmarks and the report of evaluate."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spec_trainer.measure.evaluation.tables import evaluation_lines

from ..launching import started
from .broken_models import with_nan

PROMPTS = 5
EVALUATION = {
    "acceptance_length_before", "acceptance_length", "acceptance_per_position", "drafted", "accepted", "rounds",
    "generated_tokens", "outputs_equal", "tokens_per_s", "tokens_per_s_without_draft",
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first rows: each is answered with a draft and without one, greedily and sampled."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:PROMPTS]))
    return file


def test_logs_go_to_stderr_and_the_document_to_stdout(trained, peaked_target, prompts):
    """The real program: stdout is one JSON document whatever libraries have to say."""
    child = _finished(
        ["evaluate", "--target", str(peaked_target), "--draft-model", str(trained / "draft"),
         "--prompts", str(prompts), "--max-new-tokens", "2", "--temperature", "0", "--json"]
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert isinstance(json.loads(child.stdout), dict)


def test_a_draft_that_is_not_finite_is_not_evaluated(command_line, trained, tmp_path, peaked_target, prompts):
    draft = with_nan(shutil.copytree(trained / "draft", tmp_path / "draft"))
    asked = ("--target", peaked_target, "--prompts", prompts)
    line = command_line("evaluate", "--draft-model", draft, *asked).error
    assert line.startswith(f"draft {draft}: ")
    assert "holds values that are not finite" in line


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


def _finished(words: list[str]) -> subprocess.CompletedProcess[str]:
    with started(words) as child:
        out, err = child.communicate(timeout=90)
    return subprocess.CompletedProcess(words, child.returncode, out, err)
