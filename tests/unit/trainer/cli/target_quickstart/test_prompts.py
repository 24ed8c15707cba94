"""Prompts that the target writes, and those that are taken from data."""

import json
from uuid import uuid4

import pytest

from spec_core.errors import DataError
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.cli.target_quickstart import prompts
from spec_trainer.cli.target_quickstart.engine import AnsweringEngine
from spec_trainer.cli.target_quickstart.kept_questions import KeptQuestions
from spec_trainer.cli.target_quickstart.prompts import (
    PromptCounts,
    distinct_questions,
    question_prefix,
    rows_of_data,
    words_of,
)
from spec_trainer.cli.target_quickstart.request import TargetQuickstart
from spec_trainer.cli.target_quickstart.work import check_request
from spec_trainer.data.tokens import Encoder

from .....byte_chats import byte_chat_target
from .....chat_templates import byte_tokenizer

END = 257
"""The id of <|im_end|>."""


@pytest.fixture(scope="module")
def target(make_target):
    return byte_chat_target(make_target)


@pytest.fixture
def make_work(target, tmp_path):
    """``make_work(data=None)``: a checked request."""
    return lambda data=None: check_request(
        TargetQuickstart(
            target=str(target), data=data, draft="eagle3", engine="hf", backend="cpu", output=tmp_path / "out"
        )
    )


def test_the_text_before_a_question_is_the_templates(target):
    encoder = Encoder(target, 260)
    prefix = question_prefix(encoder)
    assert encoder.decode(prefix.token_ids) == "<|im_start|>user\n"
    assert prefix.end == END


@pytest.fixture
def without_template(make_target):
    """A target whose tokenizer has no chat template."""
    folder = make_target("llama", vocab_size=260, eos_token_id=2)
    byte_tokenizer(
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>"), None, "<|im_end|>"
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("has_data", [False, True])
def test_without_a_template_rows_of_text_are_asked_for_before_anything_is_created(
    without_template, tmp_path, has_data
):
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "why?"}]}) + "\n")
    request = TargetQuickstart(
        target=str(without_template),
        data=str(data) if has_data else None,
        draft="eagle3",
        engine="hf",
        backend="cpu",
        output=tmp_path / "out",
    )
    # data.chat_template, which other commands name, is no key that quickstart takes
    asked = r"no chat template, .*; put a chat_template\.jinja there, or give --data with rows of text$"
    with pytest.raises(DataError, match=asked):
        check_request(request)
    assert not request.output.exists()


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [("What is Jazz?", "what is  jazz", True), ("What is jazz?", "What was jazz?", False), ("¿?", "…", True)],
)
def test_questions_are_equal_by_their_words(one, other, equal):
    assert (words_of(one) == words_of(other)) is equal


def sampled(work, known, position, limit, wanted=6, file=None):
    file = file or work.folder.root.with_name(f"questions-{uuid4()}.jsonl")
    with AnsweringEngine(work.options, work.target) as engine:
        kept = KeptQuestions(file, position)
        return prompts.sample_questions(work, engine, known, kept, wanted, limit)


def test_the_target_writes_each_question_once_and_ends_it(make_work):
    rows, counts = sampled(make_work(), {}, 5, TimeLimit(60))
    texts = [row["messages"][0]["content"] for row in rows]
    assert len(texts) == len(set(map(words_of, texts))) > 0
    assert not any("<|im_" in text or not words_of(text) for text in texts)
    assert counts.taken == len(rows) + counts.repeated + counts.unfinished + counts.unusable
    assert counts.position >= 5 + counts.taken
    again, _ = sampled(make_work(), set(map(words_of, texts)), 5, TimeLimit(60))
    assert not set(texts) & {row["messages"][0]["content"] for row in again}


def test_questions_of_a_killed_call_are_kept_and_its_samples_not_drawn_again(make_work, tmp_path):
    file = tmp_path / "questions.jsonl"
    first, counts = sampled(make_work(), {}, 5, TimeLimit(60), 2, file)
    with file.open("a") as stream:
        stream.write('{"row": {"messages": [{"ro')  # the command is killed here
    rows, more = sampled(make_work(), {}, 5, TimeLimit(60), 4, file)
    assert rows[: len(first)] == first
    assert len(KeptQuestions(file, 5).rows) == 4
    assert len({words_of(row["messages"][0]["content"]) for row in rows}) == len(rows)
    assert more.taken > counts.taken
    assert more.position >= counts.position + more.taken - counts.taken


@pytest.mark.parametrize(("has_begun", "taken"), [(True, 0), (False, 1)])
def test_time_that_has_not_begun_begins_with_the_first_question(make_work, has_begun, taken):
    _, counts = sampled(make_work(), {}, 0, TimeLimit(1e-9, has_begun=has_begun))
    assert counts.taken == taken


def test_samples_that_repeat_or_do_not_end_are_counted():
    samples = [(" Why?", True), ("why", True), ("And how?", True), ("never ends", False), ("...", True)]
    counts = PromptCounts(source="here")
    rows = list(distinct_questions(samples, {"and how"}, counts))
    assert [row["messages"] for row in rows] == [[{"role": "user", "content": "Why?"}]]
    assert (counts.taken, counts.repeated, counts.unfinished, counts.unusable) == (5, 2, 1, 1)


def test_rounds_take_different_rows_of_the_data_and_each_prompt_once(make_work, tmp_path):
    file = tmp_path / "data.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(20)]
    rest = [*rows[:5], {"messages": 3}, {"text": "x" * 999}]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rest]))
    work = make_work(str(file))
    first, counts = rows_of_data(work, [], 0, 8)
    second, others = rows_of_data(work, first, counts.position, 100)
    assert counts.position == counts.taken == 8
    assert others.position == 27
    assert counts.unusable + others.unusable == 2
    assert counts.repeated + others.repeated == 5
    texts = [row["messages"][0]["content"] for row in (*first, *second)]
    assert sorted(texts) == sorted(row["messages"][0]["content"] for row in rows)
    assert texts != sorted(texts)
