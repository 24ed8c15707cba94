"""One row, answered turn by turn with answers that the test makes up, and what training reads of it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spec_trainer.configuration.data import DataConfig
from spec_trainer.data.dataset import load_dataset
from spec_trainer.data.errors import BadRow
from spec_trainer.data.tokens import Encoder
from spec_trainer.measure.regeneration.conversation import open_conversation

from .....chat_templates import CHATML, byte_tokenizer, stretches

THOUGHTLESS = CHATML.replace(
    "m.content +", "(m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1]) +"
)
"""Reasoning is dropped from all but the last turn."""
VOCAB = 300
LONGEST = 200

SYSTEM = {"role": "system", "content": "be brief"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def target(tmp_path: Path) -> Callable[[str], Path]:
    """A byte-level tokenizer that also knows ``hello`` and ``he``, in a folder with that chat template."""

    def make(template: str) -> Path:
        specials, hello = ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ["he", "hel", "hell", "hello"]
        merges = [(word[:-1], word[-1]) for word in hello]
        byte_tokenizer(specials, template, "<|im_end|>", merges).save_pretrained(tmp_path / "target")
        return tmp_path / "target"

    return make


class Talk:
    """A conversation and its tokenizer; ``say`` answers with text that is spelt letter by letter."""

    def __init__(self, folder: Path, row: object, longest: int = LONGEST) -> None:
        self.row = row
        self.encoder = Encoder(folder, VOCAB)
        self.ends = [self.ids("<|im_end|>")[0], self.ids("<|endoftext|>")[0]]
        self.conversation = open_conversation(row, self.encoder, self.ends, longest)

    def ids(self, text: str) -> list[int]:
        return self.encoder._tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def prompt(self) -> str:
        return self.encoder.decode(self.conversation.prompt)

    def say(self, text: str, end: str = "<|im_end|>") -> list[int]:
        ids = [number for letter in text for number in self.ids(letter)] + (self.ids(end) if end else [])
        self.conversation.take(ids, max_new_tokens=len(ids) if not end else 1000)
        return ids

    def written(self) -> dict:
        return json.loads(json.dumps(self.conversation.row(7, self.row)))

    def supervised(self) -> list[list[int]]:
        """Stretches of supervised tokens."""
        row = self.written()
        return stretches(row["input_ids"], row["loss_mask"])


def test_turns_are_answered_in_the_context_of_new_answers(target):
    messages = [SYSTEM, user("hi"), assistant("old one"), user("so?"), assistant("old two")]
    talk = Talk(target(CHATML), {"messages": messages, "id": "c1"})
    before = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert talk.prompt == before
    first = talk.say("hello")
    assert talk.prompt == before + "hello<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    second = talk.say("well, hello")
    assert talk.conversation.prompt == []
    row = talk.written()
    assert row["messages"] == [SYSTEM, user("hi"), assistant("hello"), user("so?"), assistant("well, hello")]
    assert (row["id"], row["row"], row["finish_reason"]) == ("c1", 7, "stop")
    assert talk.supervised() == [first, second]


def test_tokens_are_those_that_were_generated_not_those_of_the_text(target):
    """The tokenizer would spell ``hello`` as one token; the target said five."""
    talk = Talk(
        target(CHATML), {"messages": [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]}
    )
    first, second, third = talk.say("hello"), talk.say("hello hello"), talk.say("hello")
    assert len(first) == 6
    assert len(talk.ids("hello<|im_end|>")) == 2
    assert talk.supervised() == [first, second, third]


def test_training_reads_exactly_these_tokens(target, tmp_path):
    folder = target(CHATML)
    talk = Talk(folder, {"messages": [user("a"), assistant("b"), user("c")]})
    talk.say("hello"), talk.say("hello")
    row = talk.written()
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (sample,) = load_dataset(DataConfig(path=str(file), eval_samples=0), folder, VOCAB).train
    assert sample.input_ids.tolist() == row["input_ids"]
    assert sample.loss_mask.tolist() == [bool(wanted) for wanted in row["loss_mask"]]


def test_the_text_alone_trains_on_the_same_words(target, tmp_path):
    folder = target(CHATML)
    talk = Talk(folder, {"system": "be brief", "messages": [user("a"), assistant("b"), user("c")]})
    talk.say("yes"), talk.say("no")
    row = talk.written()
    text = {key: value for key, value in row.items() if key not in ("input_ids", "loss_mask")}
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(text) + "\n")
    (sample,) = load_dataset(DataConfig(path=str(file), eval_samples=0), folder, VOCAB).train
    assert talk.encoder.decode(sample.input_ids) == talk.encoder.decode(row["input_ids"]) + "\n"
    assert sample.loss_mask.tolist()[:-1] == [bool(wanted) for wanted in row["loss_mask"]]


def test_an_end_token_that_the_template_does_not_write_is_no_part_of_the_context(target):
    talk = Talk(target(CHATML), {"messages": [user("a"), assistant("b"), user("c")]})
    first = talk.say("hello", end="<|endoftext|>")
    assert "endoftext" not in talk.prompt
    assert talk.prompt.count("hello<|im_end|>\n") == 1
    second = talk.say("ho", end="<|endoftext|>")
    assert talk.supervised() == [first[:-1], second]


def test_answers_that_the_template_changes_later_are_not_supervised_there(target):
    talk = Talk(target(THOUGHTLESS), {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]})
    talk.say("hm</think>yes")
    assert "hm" not in talk.prompt
    assert "yes<|im_end|>" in talk.prompt
    second = talk.say("ho</think>no")
    assert talk.supervised() == [second]
    assert talk.written()["messages"][1] == assistant("hm</think>yes")


def test_a_cut_answer_is_the_last_one(target):
    talk = Talk(target(CHATML), {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]})
    cut = talk.say("hello and", end="")
    assert talk.conversation.prompt == []
    assert talk.conversation.was_cut
    row = talk.written()
    assert row["messages"] == [user("a"), assistant("hello and")]
    assert row["finish_reason"] == "length"
    assert talk.supervised() == [cut]


def test_a_conversation_that_has_become_too_long_ends_there(target):
    row = {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}
    talk = Talk(target(CHATML), row, longest=40)
    first = talk.say("hello" * 4)
    assert talk.conversation.prompt == []
    assert talk.written()["finish_reason"] == "length"
    assert talk.supervised() == [first]


@pytest.mark.parametrize(
    ("messages", "answers", "roles"),
    [
        ([user("a")], 1, "ua"),
        ([user("a"), user("b"), assistant("c")], 1, "uua"),
        ([assistant("welcome"), user("a"), assistant("b")], 1, "aua"),
        ([user("a"), assistant("b"), assistant("more of b"), user("c")], 2, "uaua"),
        ([user("a"), assistant("b"), SYSTEM], 1, "ua"),
    ],
    ids=["prompt only", "two questions", "greeting", "continuation", "nothing asked at the end"],
)
def test_what_is_answered_and_what_is_kept(target, messages, answers, roles):
    talk = Talk(target(CHATML), {"messages": messages})
    given = 0
    while talk.conversation.prompt:
        talk.say(f"n{given}")
        given += 1
    written = talk.written()["messages"]
    assert given == answers
    assert "".join(message["role"][0] for message in written) == roles
    assert [m["content"] for m in written if m["content"].startswith("n")] == [f"n{i}" for i in range(given)]


def test_tool_calls_and_their_results_are_kept(target):
    template = CHATML.replace("m.content", "(m.content or 'CALL')")
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    result = {"role": "tool", "content": "42"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    talk = Talk(target(template), {"messages": [user("a"), call, result, assistant("old")], "tools": tools})
    assert talk.prompt.endswith("tool\n42<|im_end|>\n<|im_start|>assistant\n")
    answer = talk.say("42, then")
    row = talk.written()
    assert row["messages"] == [user("a"), call, result, assistant("42, then")]
    assert row["tools"] == tools
    assert talk.supervised() == [answer]


def test_a_text_is_continued(target):
    talk = Talk(target(CHATML), {"text": "once upon"})
    answer = talk.say(" a time")
    row = talk.written()
    assert row["text"] == "once upon a time"
    assert row["input_ids"] == talk.ids("once upon") + answer
    assert talk.supervised() == [answer]


def test_the_last_supervised_run_of_tokens_is_replaced(target):
    row = {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 1, 0, 0, 1, 1]}
    talk = Talk(target(CHATML), row)
    assert talk.conversation.prompt == [5, 6, 7, 8]
    answer = talk.say("so")
    assert talk.written()["input_ids"] == [5, 6, 7, 8, *answer]
    assert talk.written()["loss_mask"] == [0, 0, 0, 0, *[1] * len(answer)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [SYSTEM]}, "nothing to answer"),
        ({"messages": [assistant("welcome")]}, "nothing to answer"),
        ({"messages": [user("x" * 300)]}, "prompt too long: .* 200 are possible"),
        ({"text": ""}, "nothing to answer"),
        ({"words": 1}, "unknown shape"),
    ],
)
def test_rows_that_cannot_be_answered(target, row, reason):
    with pytest.raises(BadRow, match=reason):
        Talk(target(CHATML), row)
