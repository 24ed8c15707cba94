"""Right answers as in GSM8K and MMLU, and the last number or letter of a text."""

from decimal import Decimal

import pytest

from spec_core.records import Generation, SamplingParams
from spec_trainer.measure.evaluation.document import summarise
from spec_trainer.measure.evaluation.grading import (
    accuracy,
    last_letter,
    last_number,
    right_answer,
    right_number,
)
from spec_trainer.measure.evaluation.measure import Passes
from spec_trainer.measure.evaluation.tables import benchmark_lines
from spec_trainer.measure.evaluation.workload import Workload
from spec_trainer.workers.passes import Pass


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 hens, so \\boxed{7}.", "7"),
        ("It costs $1,234.50.", "1234.5"),
        ("The change is -12", "-12"),
        ("2 and then .5", "0.5"),
        ("none", None),
        ("", None),
        ("9" * 10_000, "9" * 10_000),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("3 + 4 = 7\n#### 7", 7),
        ("5 #### 1,000", 1000),
        ("7", None),
        (70, None),
        (None, None),
        ("#### x", None),
    ],
)
def test_the_right_number_of_a_row(answer, number):
    assert right_number(answer) == number


@pytest.mark.parametrize(
    ("text", "letter"),
    [("so \\boxed{B}.", "B"), ("(A) is wrong, (C) is right", "C"), ("ABC, I think", None), ("", None)],
)
def test_the_last_letter_of_a_text(text, letter):
    assert last_letter(text) == letter


@pytest.mark.parametrize(
    ("row", "right"),
    [
        ({"choices": ["1", "2", "3", "4"], "answer": 2}, "C"),
        ({"choices": ["1", "2"], "answer": 2}, None),
        ({"choices": ["1", "2"], "answer": True}, None),
        ({"choices": ["1", "2"]}, None),
        ({"answer": "#### 7"}, 7),
        ({}, None),
    ],
)
def test_the_right_answer_of_a_row(row, right):
    assert right_answer(row) == right


def test_letters_and_numbers_are_graded_together():
    assert accuracy(["\\boxed{B}", "\\boxed{A}", "7"], ["B", "B", Decimal(7)]) == 2 / 3


def test_accuracy_leaves_out_what_has_no_right_number():
    right = [Decimal(7), None, Decimal(8), Decimal(9)]
    assert accuracy(["is 7.0", "4", "is 80", "8 or 9"], right) == 2 / 3
    assert accuracy(["7"], [None]) is None


def test_a_benchmark_is_graded_with_the_draft_and_without():
    """Token ids are numbers here."""
    work = Workload(
        prompts=[[1], [2], [3]],
        benchmarks=("gsm8k", "alpaca", "gsm8k"),
        right=(Decimal(5), None, Decimal(6)),
        sampling=SamplingParams(max_new_tokens=1, num_draft_tokens=2),
    )

    def passes(*ids: int) -> Passes:
        one, two, three = (Generation(token_ids=(number,)) for number in ids)
        parts = {"gsm8k": Pass(answers=[one, three], seconds=1.0), "alpaca": Pass(answers=[two], seconds=1.0)}
        return Passes(greedy=Pass.joined(parts), sampled=None, loads={})

    document = summarise(work, passes(5, 1, 6), passes(5, 1, 7), lambda ids: " ".join(map(str, ids)))
    rows = document["benchmarks"]
    assert (rows["gsm8k"]["accuracy"], rows["gsm8k"]["accuracy_without_draft"]) == (0.5, 1.0)
    assert (rows["alpaca"]["accuracy"], rows["alpaca"]["accuracy_without_draft"]) == (None, None)
    lines = list(benchmark_lines({**document, "prompts": 3}))
    assert "gsm8k: 50.0 % of the answers are right, 100.0 % without the draft" in lines
