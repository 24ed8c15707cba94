"""Data of which no answer ends as the target's answers do is warned of."""

from dataclasses import replace

import numpy as np
import pytest

from spec_kit.targets import read_target
from spec_trainer.data.chat import HEADER_MARKED
from spec_trainer.data.dataset import Sample
from spec_trainer.data.report import DataReport
from spec_trainer.plan.end_tokens import end_token_warning, marks_warning

ANSWER = ([5, 6, 7, 8], [0, 0, 1, 1])
ENDED = ([5, 6, 7, 2], [0, 0, 1, 1])
CUT_IN_CHATML = ([5, 2, 7, 8], [0, 0, 1, 1])
END_UNMARKED = ([5, 6, 7, 2], [0, 0, 1, 0])
TEXT = ([5, 6, 7, 8], [1, 1, 1, 1])
QUESTION = ([5, 6, 7, 8], [0, 0, 0, 0])


@pytest.fixture
def target(tiny_llama):
    return replace(read_target(tiny_llama), eos_token_ids=(2, 3))


def samples(*rows):
    return [
        Sample(number, np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))
        for number, (ids, mask) in enumerate(rows)
    ]


def test_answers_without_an_end_token_of_the_target_are_named(target):
    line = end_token_warning(samples(ANSWER, ANSWER, TEXT, QUESTION), target)
    assert "2 samples with a prompt and an answer" in line
    assert "(2, 3)" in line
    assert str(target.folder) in line
    assert "\n" not in line


@pytest.mark.parametrize("rows", [[ANSWER, ENDED], [TEXT], [QUESTION], []])
def test_one_end_is_enough_and_texts_and_questions_need_none(target, rows):
    assert end_token_warning(samples(*rows), target) is None


def test_a_target_without_end_tokens_is_not_judged(target):
    assert end_token_warning(samples(ANSWER), replace(target, eos_token_ids=())) is None


def test_end_tokens_that_are_not_supervised_are_counted(target):
    line = end_token_warning(samples(ANSWER, END_UNMARKED, END_UNMARKED), target)
    assert "3 samples with a prompt and an answer, none with a supervised end token" in line
    assert "2 samples with such a token right behind the supervised tokens" in line
    assert "{% generation %}" in line


def test_end_tokens_of_the_users_turns_say_nothing_about_answers(target):
    line = end_token_warning(samples(CUT_IN_CHATML), target)
    assert "may all have been cut (spec-trainer regenerate --max-new-tokens)" in line
    assert "{% generation %}" not in line


def test_marks_of_a_template_that_begin_before_the_answer_are_named():
    report = DataReport()
    assert marks_warning(report) is None
    report.note(HEADER_MARKED, "rows.jsonl:3")
    assert "marks that begin before the answer, in 1 row (first: rows.jsonl:3)" in marks_warning(report)
