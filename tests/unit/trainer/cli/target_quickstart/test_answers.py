"""A round whose target is slow gets shorter answers, and at last a message."""

import json
import re

import pytest

from spec_core.errors import RunError
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.cli.target_quickstart import answers
from spec_trainer.cli.target_quickstart.engine import AnsweringEngine
from spec_trainer.cli.target_quickstart.folder import read_all, read_document, write_document, write_rows
from spec_trainer.cli.target_quickstart.work import check_request
from spec_trainer.configuration.chat import meta_of_answers

LONG_S = 600.0


@pytest.fixture
def begun(request_of, data, tmp_path):
    """A checked request, and a round that has prompts to answer."""
    work = check_request(request_of(data=str(data)))
    work.folder.root.mkdir()
    write_document(work.folder.cost, {"token_ms": 1.0})
    one = work.folder.next_round(LONG_S, "report")
    write_rows(one.prompts, [json.loads(line) for line in data.read_text().splitlines()[:12]])
    return work, one


def engine_of(work):
    return AnsweringEngine(work.options, work.target)


def test_after_hardly_any_answer_shorter_ones_are_given(begun):
    work, one = begun
    write_document(one.answer_settings, {"max_new_tokens": 60})
    answers.answer_round(work, engine_of(work), one, (), TimeLimit(0), TimeLimit(LONG_S))
    assert read_document(one.answer_settings) == {"max_new_tokens": 30}
    rows = read_all(one.training)
    assert len(rows) == 12
    assert max(sum(row["loss_mask"]) for row in rows) <= 30
    assert read_document(meta_of_answers(one.answers))["settings"]["temperature"] == 0


@pytest.mark.parametrize(("longest", "whole_s"), [(24, LONG_S), (60, 0)])
def test_if_they_cannot_be_shorter_or_no_time_is_left_it_ends(begun, longest, whole_s):
    work, one = begun
    write_document(one.answer_settings, {"max_new_tokens": longest})
    with pytest.raises(RunError, match="the target gave 1 answer within the budget; give a larger --budget"):
        answers.answer_round(work, engine_of(work), one, (), TimeLimit(0), TimeLimit(whole_s))
    assert read_document(one.answer_settings) == {"max_new_tokens": longest}
    assert not one.training.exists()


def test_the_time_begins_when_the_engine_has_answered_once(begun):
    """Some engines start with their first prompt."""
    work, one = begun
    limit, has_begun = TimeLimit(LONG_S, has_begun=False), list[bool]()
    with engine_of(work) as engine:
        decode = engine.started().generate_unordered

        def noted(*arguments):
            has_begun.append(limit.left_s < LONG_S)
            return decode(*arguments)

        engine.started().generate_unordered = noted
        answers.answer_round(work, engine, one, (), limit, TimeLimit(LONG_S))
    assert has_begun == [False, True]


def test_progress_within_a_limit_foretells_no_end(begun, caplog):
    """An estimate for all prompts, such as eight hours within a budget of minutes, would be wrong."""
    work, one = begun
    with caplog.at_level("INFO"):
        answers.answer_round(work, engine_of(work), one, (), TimeLimit(LONG_S), TimeLimit(LONG_S))
    lines = [message for message in caplog.messages if message.startswith("row ")]
    assert lines
    assert all(re.fullmatch(r"row \d+ [\d,]+ tok/s", line) for line in lines)


def test_a_single_prompt_gets_no_shorter_answer(begun):
    work, one = begun
    write_rows(one.prompts, read_all(one.prompts)[:1])
    write_document(one.answer_settings, {"max_new_tokens": 60})
    with pytest.raises(RunError, match="gave 1 answer"):
        answers.answer_round(work, engine_of(work), one, (), TimeLimit(LONG_S), TimeLimit(LONG_S))
    assert read_document(one.answer_settings) == {"max_new_tokens": 60}


def test_a_round_without_further_prompts_has_the_answers_of_the_earlier_ones(begun):
    """As with a larger budget, if the user's data had no more prompts."""
    work, first = begun
    write_rows(first.training, [{"row": 0}, {"row": 1}])
    first.end_stage("report", 0.0)
    second = work.folder.next_round(2 * LONG_S, "report")
    write_rows(second.prompts, [])
    answers.answer_round(work, engine_of(work), second, [first], TimeLimit(LONG_S), TimeLimit(LONG_S))
    assert read_all(second.training) == read_all(first.training)
