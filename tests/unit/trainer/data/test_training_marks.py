"""Answers that the data marks as not to be trained."""

import pytest

from spec_core.errors import DataError

from ....chat_templates import CHATML

MARKING = CHATML.replace(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}",
)


def conversation(*marks, **fields):
    """Three answers with these fields beside their content."""
    answers = zip("bdf", marks or [{}] * 3, strict=True)
    turns = [
        turn
        for question, (answer, own) in zip("ace", answers, strict=True)
        for turn in ({"role": "user", "content": question}, {"role": "assistant", "content": answer, **own})
    ]
    return {"messages": turns, **fields}


MARKED = {
    "weight": conversation({"weight": 0}, {"weight": 1}, {}),
    "weight as Parquet has it": conversation({"weight": 0.0}, {"weight": 1.0}, {"weight": None}),
    "train": conversation({"train": False}, {"train": True}, {}),
    "trainable": conversation({"trainable": False}, {}, {}),
    "loss": conversation({"loss": False}, {}, {}),
    "a mask": conversation(loss_mask=[0, 0, 0, 1, 0, 1]),
    "a mask of flags": conversation(loss_mask=[True, False, True, True, True, True]),
    "a mask and a system prompt": conversation(loss_mask=[0, 0, 0, 1, 0, 1], system="s"),
}


@pytest.mark.parametrize("template", [CHATML, MARKING], ids=["found", "marked by the template"])
@pytest.mark.parametrize("how", MARKED)
def test_an_answer_that_is_marked_is_context_only(load, supervised, how, template):
    assert supervised(load(MARKED[how], template=template).sample(0)) == "d<|im_end|> | f<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, MARKING], ids=["found", "marked by the template"])
def test_a_last_turn_that_is_marked_leaves_nothing_to_learn(load, supervised, template):
    marked, plain = conversation({}, {}, {"weight": 0}, last_turn_only=True), conversation()
    dataset = load(marked, plain, template=template)
    assert not dataset.sample(0).loss_mask.any()
    assert dataset.report.unsupervised.count == 1


def test_marks_follow_their_answers_when_prompts_of_the_system_are_merged(load, supervised):
    row = conversation({"weight": 0}, {}, {})
    row["messages"][0:0] = [{"role": role, "content": role} for role in ("system", "developer")]
    assert supervised(load(row).sample(0)) == "d<|im_end|> | f<|im_end|>"


def test_the_template_does_not_see_the_marks(load):
    template = CHATML.replace("m.content", "(m | tojson)")
    marked = conversation({"weight": 1, "train": True}, {"loss": True}, {"trainable": 1})
    first, second = load(marked, conversation(), template=template).train
    assert first.input_ids.tolist() == second.input_ids.tolist()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (conversation({"weight": 0.5}, {}, {}), "weight of message 2 is 0.5, expected 1 (trained) or 0"),
        (conversation({}, {"train": "no"}, {}), "train of message 4 is 'no', expected 1"),
        (conversation({"weight": float("nan")}, {}, {}), "weight of message 2 is nan"),
        (conversation(loss_mask=[0, 0, 0, 1, 0, -1]), "loss_mask[5] is -1, expected 1"),
        (conversation(loss_mask=[0, 1, 1]), "loss_mask is 3 values, expected a value for each of 6 messages"),
        (conversation(loss_mask=1), "loss_mask is 1, expected a value for each of 6 messages"),
        (conversation({"train_detail": []}, {}, {}), "message 2 has train_detail, and parts of an answer"),
    ],
)
def test_a_mark_that_is_neither_yes_nor_no_makes_the_row_bad(load, row, problem):
    with pytest.raises(DataError, match="bad training mark") as refused:
        load(row)
    assert problem in str(refused.value)
