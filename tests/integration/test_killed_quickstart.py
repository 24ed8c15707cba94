"""``quickstart --target``, killed in each of its longer stages: the same command goes on there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ..byte_chats import byte_chat_target
from . import run_directory
from .launching import running, until

BUDGET = "20s"
"""The smallest budget. A killed stage has its share of what is left."""
LIMIT_S = 300.0
"""Longest time of one call, on a machine that is busy with other things."""


@pytest.fixture(scope="module")
def words(make_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("quickstart")
    data = folder / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"question {number}?"}]} for number in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = byte_chat_target(make_target)
    return [
        "quickstart",
        "--target",
        str(target),
        "--data",
        str(data),
        "--budget",
        BUDGET,
        "--backend",
        "cpu",
    ]


@pytest.mark.slow
def test_killed_while_it_answers_and_while_it_trains_it_goes_on_there(words, tmp_path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    one = out / "round-1"
    words = [*words, "--output", str(out)]

    def killed_once(file: Path) -> dict[str, float]:
        """Kill the command as soon as there is a line in ``file``; return the times of the stages that had ended."""
        with running(words, log) as process:
            until(
                lambda: process.poll() is not None or (file.exists() and b"\n" in file.read_bytes()), LIMIT_S
            )
            assert process.poll() is None, log.read_text()
        return json.loads((one / "times.json").read_text())

    times = killed_once(one / "answers.jsonl")
    assert list(times)[:2] == ["prompts", "cost"]
    before = {file: file.read_bytes() for file in (out / "held_out.jsonl", one / "prompts.jsonl")}
    answered = (one / "answers.jsonl").read_bytes().splitlines()[0]

    times = killed_once(one / "run/metrics.jsonl")
    assert list(times)[:3] == ["prompts", "cost", "answers"]
    assert answered in (one / "answers.jsonl").read_bytes().splitlines(), "the first answer was kept"
    before |= {file: file.read_bytes() for file in (one / "answers.jsonl", one / "training.jsonl")}

    with running(words, log) as process:
        assert process.wait(LIMIT_S) == 0, log.read_text()
    assert {file: file.read_bytes() for file in before} == before
    after = json.loads((one / "times.json").read_text())
    assert list(after) == ["prompts", "cost", "answers", "training", "figures", "report"]
    assert {stage: after[stage] for stage in times} == times
    summary = run_directory.summary(out)
    lost_s = json.loads((one / "unended.json").read_text())["interrupted_s"]
    assert summary["rounds"][0]["spent_s"]["interrupted"] == lost_s > 0, (
        "the time of killed stages is charged"
    )
    assert summary["steps"] >= 1
    assert summary["acceptance_length"] >= 1
    assert not (out / "round-2").exists()
