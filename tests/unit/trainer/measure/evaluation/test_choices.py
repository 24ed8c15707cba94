"""Questions with choices, and answers that name one."""

import json

import pytest

from spec_core.errors import DataError
from spec_trainer.measure.evaluation.benchmarks import read_benchmarks


def test_a_question_has_some_choices(tmp_path):
    for choices in ("one", ["one"], ["one"] * 9):
        (tmp_path / "mmlu.jsonl").write_text(json.dumps({"question": "Which?", "choices": choices}))
        with pytest.raises(DataError, match="expected a list of 2 to 8 texts in 'choices'"):
            read_benchmarks({"mmlu": None}, tmp_path)


@pytest.mark.parametrize("answer", [9, 2, -1, "Z", "C", "", True, 1.5, [1]])
def test_an_answer_that_is_no_choice_is_refused(tmp_path, answer):
    row = {"question": "Which?", "choices": ["one", "two"], "answer": answer}
    (tmp_path / "mmlu.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"'answer' is .*, expected the index or the letter of a choice"):
        read_benchmarks({"mmlu": None}, tmp_path)


@pytest.mark.parametrize(("answer", "right"), [(0, "A"), (1, "B"), ("B", "B"), (None, None)])
def test_an_answer_is_the_index_or_the_letter_of_a_choice(tmp_path, answer, right):
    row = {"question": "Which?", "choices": ["one", "two"], "answer": answer}
    (tmp_path / "mmlu.jsonl").write_text(json.dumps(row))
    assert [found.right for found in read_benchmarks({"mmlu": None}, tmp_path)] == [right]
