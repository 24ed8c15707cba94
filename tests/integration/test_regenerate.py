"""The target answers a file of prompts anew: every row once, in order, the same whatever interrupts it."""

import json
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec_core.errors import DataError
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.cli.app import run
from spec_trainer.cli.commands.regenerate import prepare_regeneration, regenerate_answers
from spec_trainer.measure.regeneration.request import RegenerationRequest

from ..byte_chats import byte_chat_target, chat_rows
from .launching import started, until

ROWS = 16


@pytest.fixture(scope="module")
def target(make_target: Callable[..., Path]) -> Path:
    return byte_chat_target(make_target)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(ROWS)))
    return file


@pytest.fixture(scope="module")
def words(target: Path, prompts: Path) -> Callable[..., list[str]]:
    def build(
        output: Path, *more: object, seed: int = 3, longest: int = 24, data: Path = prompts
    ) -> list[str]:
        fixed = ["--max-new-tokens", longest, "--seed", seed]
        inputs = ["--target", target, "--data", data, "--output", output]
        return [str(word) for word in ("regenerate", *inputs, *fixed, *more)]

    return build


@pytest.fixture(scope="module")
def answered(words: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("answered") / "answers.jsonl"
    assert run(words(output)) == 0
    return output


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_row_is_answered_in_order_and_keeps_what_others_said(answered, prompts):
    before, after = rows_of(prompts), rows_of(answered)
    assert [row["row"] for row in after] == list(range(ROWS))
    for old, new in zip(before, after, strict=True):
        assert len(new["input_ids"]) == len(new["loss_mask"])
        assert 1 in new["loss_mask"]
        assert old.get("id") == new.get("id")
        if "messages" in old:
            said = [message for message in old["messages"] if message["role"] != "assistant"]
            kept = [message for message in new["messages"] if message["role"] != "assistant"]
            assert kept == said[: len(kept)]
            assert new["messages"][-1]["role"] == "assistant"
            assert all(m["content"] != "old" for m in new["messages"])
            if new["finish_reason"] == "stop":
                assert len(kept) == len(said)
    assert {row["finish_reason"] for row in after} == {"stop", "length"}


def test_greedy_answers_are_the_targets_own(words, target, tmp_path):
    """Checked against Transformers' own generation."""
    import torch
    from transformers import AutoModelForCausalLM

    assert run(words(tmp_path / "greedy.jsonl", "--temperature", "0")) == 0
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    for row in rows_of(tmp_path / "greedy.jsonl")[:12]:
        start = len(row["loss_mask"]) - row["loss_mask"][::-1].index(0)
        ids = torch.tensor([row["input_ids"][:start]])
        with torch.no_grad():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
            )
        assert whole[0].tolist() == row["input_ids"]


def test_answers_are_prompts_again(words, answered, tmp_path):
    output = tmp_path / "again.jsonl"
    for _ in range(2):  # the second time it reads its own lines
        assert run(words(output, data=answered)) == 0
    assert [row["row"] for row in rows_of(output)] == list(range(ROWS))


def test_training_takes_the_answers(answered, target, tmp_path):
    flags = ["--target", str(target), "--data", str(answered), "--output", str(tmp_path / "run")]
    assert run([*flags, "train.steps=1", "draft.num_steps=2"]) == 0


@pytest.mark.slow
def test_killed_and_asked_to_stop_it_goes_on_to_the_same_file(words, answered, tmp_path):
    """Killed at any moment, and in the middle of a line; then asked to stop. Lines come as rows end."""
    output = tmp_path / "answers.jsonl"
    moments = random.Random(1)
    with started(words(output)) as child:
        until(lambda: output.exists() and "\n" in output.read_text())
        time.sleep(moments.uniform(0, 0.2))
        child.send_signal(signal.SIGKILL)
    assert len(output.read_text()) < len(answered.read_text())
    with output.open("r+b") as half:
        half.truncate(output.stat().st_size - moments.randint(1, 80))
    kept = output.read_text().count("\n")
    with started(words(output)) as child:
        until(lambda: output.read_text().count("\n") > kept)
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    left = re.search(r"rows left: (\d+); the same command goes on there$", err.splitlines()[-1])
    assert len(rows_of(output)) + int(left[1]) == ROWS
    assert run(words(output)) == 0
    assert output.read_text() == answered.read_text()


def test_at_a_limit_of_time_it_ends_and_goes_on_to_the_same_file(words, answered, target, prompts, tmp_path):
    """A limit that is over leaves at most one row: the answer that ends first may be one of several turns."""
    output = tmp_path / "answers.jsonl"
    request = RegenerationRequest(
        target=str(target), data=str(prompts), output=output, max_new_tokens=24, seed=3
    )
    document = regenerate_answers(request, limit=TimeLimit(0))
    assert document["rows"] == ROWS
    assert document["rows_written"] == len(rows_of(output)) <= 1
    assert document["generated_tokens"] > 0
    assert run(words(output)) == 0
    assert output.read_text() == answered.read_text()


def test_greedy_answers_are_the_same_however_many_rows_are_in_progress(words, tmp_path):
    outputs = [tmp_path / f"{size}.jsonl" for size in (1, 3, 50)]
    for output in outputs:
        assert run(words(output, "--temperature", "0", f"engine.max_num_seqs={output.stem}")) == 0
    first, *others = (output.read_text() for output in outputs)
    assert [rows["row"] for rows in rows_of(outputs[0])] == list(range(ROWS))
    assert others == [first, first]


def test_answers_are_the_same_if_their_prompts_are_rendered_again(
    answered, target, prompts, tmp_path, monkeypatch
):
    """Only the first prompts stay from the check; here none, and then all do."""
    request = RegenerationRequest(
        target=str(target), data=str(prompts), output=tmp_path / "answers.jsonl", max_new_tokens=24, seed=3
    )
    first = prepare_regeneration(request, [])
    assert next(first.rows(())).conversation is next(first.rows(())).conversation
    monkeypatch.setattr("spec_trainer.cli.commands.regenerate._KEPT_TOKENS", 0)
    again = prepare_regeneration(request, [])
    assert next(again.rows(())).conversation is not next(again.rows(())).conversation
    regenerate_answers(request)
    assert request.output.read_text() == answered.read_text()


def test_parts_answer_each_row_once_as_one_command_does(words, answered, tmp_path):
    outputs = [tmp_path / f"{index}.jsonl" for index in range(3)]
    for index, output in enumerate(outputs):
        assert run(words(output, f"--part={index}/3")) == 0
    rows = [row for output in outputs for row in rows_of(output)]
    assert sorted(rows, key=lambda row: row["row"]) == rows_of(answered)


def test_a_part_that_is_none_or_of_other_answers_is_refused(words, command_line, tmp_path):
    other, output = tmp_path / "other.jsonl", tmp_path / "answers.jsonl"
    for part in ("2/2", "-1/2", "1", "0/0", "1/2/3"):
        assert f"--part={part}: expected I/N" in command_line(*words(other, f"--part={part}")).error
    assert run(words(output, "--part=1/2")) == 0
    assert "part 1/2 there, 0/2 here" in command_line(*words(output, "--part=0/2")).error
    beyond = f"{ROWS}/{ROWS + 1}"
    assert f"part {beyond} of data" in command_line(*words(other, f"--part={beyond}")).error


def test_more_engines_than_one_are_refused(words, command_line, tmp_path):
    error = command_line(*words(tmp_path / "answers.jsonl", "engine.replicas=2")).error
    assert "engine.replicas=2: this command starts one engine" in error


def test_done_it_says_so_and_starts_no_engine(words, command_line, answered):
    before = answered.read_bytes()
    document = json.loads(command_line(*words(answered), "--json").out)
    assert (document["rows"], document["rows_written"], document["generated_tokens"]) == (ROWS, ROWS, 0)
    assert answered.read_bytes() == before


def test_the_meta_file_records_what_the_answers_depend_on(answered, target):
    from spec_kit.targets.target_reader import read_target

    meta = json.loads(Path(f"{answered}.meta.json").read_text())
    settings = meta["settings"]
    assert settings["target_digest"] == read_target(target).digest
    assert settings["engine.name"] == "hf"
    assert settings["engine_versions"].keys() == {"transformers"}
    assert (settings["temperature"], settings["top_p"], settings["seed"], settings["max_new_tokens"]) == (
        1.0, 1.0, 3, 24
    )  # fmt: skip
    assert meta["result"]["rows_written"] == ROWS


@pytest.mark.parametrize(
    ("more", "difference"),
    [
        (["--temperature", "0.5"], "temperature 1.0 there, 0.5 here"),
        (["--top-p", "0.9"], "top_p 1.0 there, 0.9 here"),
        (["engine.dtype=bfloat16"], "engine.dtype None there, bfloat16 here"),
    ],
)
def test_other_settings_are_refused(words, command_line, answered, more, difference):
    before = answered.read_bytes()
    assert "(seed 3 there, 4 here)" in command_line(*words(answered, seed=4)).error
    assert f"was made with other settings ({difference})" in command_line(*words(answered, *more)).error
    assert answered.read_bytes() == before


def test_other_seeds_give_other_answers(words, answered, tmp_path):
    assert run(words(tmp_path / "other.jsonl", seed=4)) == 0
    one, other = rows_of(answered), rows_of(tmp_path / "other.jsonl")
    assert sum(a["input_ids"] == b["input_ids"] for a, b in zip(one, other, strict=True)) < ROWS / 4


def test_cut_answers_are_left_out_when_asked(words, answered, tmp_path):
    assert run(words(tmp_path / "whole.jsonl", "--drop-cut")) == 0
    assert rows_of(tmp_path / "whole.jsonl") == [
        row for row in rows_of(answered) if row["finish_reason"] == "stop"
    ]


def test_a_row_that_cannot_be_answered_stops_it_before_the_start_or_is_left_out(
    command_line, target, tmp_path
):
    data = tmp_path / "prompts.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    data.write_text(f'{good}\n{{"messages": [{{"role": "system", "content": "x"}}]}}\n{good}\n')
    words = ["regenerate", "--target", target, "--data", data, "--output", tmp_path / "answers.jsonl"]
    words += ["--max-new-tokens", "4"]
    assert command_line(*words).error == (
        f"{data}:2: nothing to answer (--on-bad-row=skip leaves such rows out)"
    )
    assert list(tmp_path.iterdir()) == [data]
    assert command_line(*words, "--on-bad-row", "skip").code == 0
    assert [row["row"] for row in rows_of(tmp_path / "answers.jsonl")] == [0, 2]


def test_data_that_change_under_way_are_noticed(target, prompts, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text(prompts.read_text())
    output = Path("a.jsonl")
    request = RegenerationRequest(target=str(target), data=str(data), output=output, max_new_tokens=8)
    work = prepare_regeneration(request, [])
    assert [row.number for row in work.rows({1, 2})] == [0, *range(3, ROWS)]
    data.write_text(prompts.read_text() + '{"text": "one more"}\n')
    with pytest.raises(DataError, match="has changed while it was answered"):
        list(work.rows(()))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--top-p", "0"], "--top-p=0.0: expected more than 0, at most 1"),
        (["--temperature", "-1"], "--temperature=-1.0: expected 0 or more"),
        (["engine.dtyp=float32"], "unknown key 'engine.dtyp' (did you mean 'dtype'?)"),
    ],
)
def test_bad_usage_is_one_line_and_makes_nothing(words, command_line, tmp_path, more, problem):
    """``test_draft_validation.py`` has what else is wrong with an engine's options."""
    assert problem in command_line(*words(tmp_path / "answers.jsonl", *more)).error
    assert list(tmp_path.iterdir()) == []


def test_answers_that_leave_no_room_for_a_prompt_are_refused(words, command_line, tmp_path):
    def error(longest: int) -> str:
        return command_line(*words(tmp_path / "answers.jsonl", longest=longest)).error

    assert error(0) == "--max-new-tokens=0: expected 1 or more"
    assert "leaves no room for a prompt in the 256 positions" in error(256)
    assert "prompt too long" in error(250)
    assert list(tmp_path.iterdir()) == []
