"""Let the target answer the prompts of a round until its time is over, as ``regenerate`` does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from spec_core.errors import RunError
from spec_core.wording import counted
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.cli.commands.regenerate import regenerate_answers
from spec_trainer.cli.target_quickstart.engine import AnsweringEngine
from spec_trainer.cli.target_quickstart.folder import (
    Round,
    read_all,
    read_document,
    write_document,
    write_rows,
)
from spec_trainer.cli.target_quickstart.recipe import (
    ANSWER_TEMPERATURE,
    FEWEST_ANSWER_TOKENS,
    answer_tokens,
)
from spec_trainer.cli.target_quickstart.work import Work
from spec_trainer.measure.regeneration.request import RegenerationRequest

log = logging.getLogger(__name__)

_FEWEST = 2
"""Least number of answers: one to train on, one to hold out."""


def answer_round(
    work: Work,
    engine: AnsweringEngine,
    one: Round,
    earlier: Sequence[Round],
    limit: TimeLimit,
    whole: TimeLimit,
) -> None:
    """Answer prompts until the time is over; write the training data, with the answers of ``earlier`` rounds.

    The engine ends with it, so that the training has the memory. ``whole``: the end of the round. With hardly any
    answers, shorter ones are tried until then. Raise RunError if there are still hardly any.
    """
    before = read_all(earlier[-1].training) if earlier else []
    if unanswered(one):  # earlier rounds may have had all prompts of the user's data
        _answer(work, engine, one, limit)
    while len(rows := _sorted(one)) < _FEWEST and not whole.is_over and _shorten(one):
        _answer(work, engine, one, TimeLimit(whole.left_s / 2))
    engine.close()
    if len(before) + len(rows) < _FEWEST:
        given = counted(len(rows), "answer")
        raise RunError(
            f"the target gave {given} within the budget; give a larger --budget, and the same command goes on"
        )
    write_rows(one.training, [*before, *rows])


def _answer(work: Work, engine: AnsweringEngine, one: Round, limit: TimeLimit) -> None:
    if not one.answer_settings.exists():  # else go on with those of the earlier call
        longest = work.lengths.answer
        if work.folder.cost.exists():
            token_s = read_document(work.folder.cost)["token_ms"] / 1000
            longest = answer_tokens(limit.left_s, token_s, len(read_all(one.prompts)), longest)
        write_document(one.answer_settings, {"max_new_tokens": longest})
    request = RegenerationRequest(
        target=str(work.target.folder),
        data=str(one.prompts),
        output=one.answers,
        engine=work.engine,
        backend=work.machine.backend,
        max_new_tokens=read_document(one.answer_settings)["max_new_tokens"],
        temperature=ANSWER_TEMPERATURE,
        on_bad_row="skip",
    )
    regenerate_answers(request, work.engine_words, limit, engine.started)


def _shorten(one: Round) -> bool:
    """Halve the length of the answers and drop those that are there; return False if all are there or short."""
    if not unanswered(one):
        return False
    longest = read_document(one.answer_settings)["max_new_tokens"]
    if longest <= FEWEST_ANSWER_TOKENS:
        return False
    shorter = max(FEWEST_ANSWER_TOKENS, longest // 2)
    log.warning("hardly any answer of %d tokens was done in time; they get %d tokens", longest, shorter)
    one.answers.unlink(missing_ok=True)  # it has the settings of its answers
    write_document(one.answer_settings, {"max_new_tokens": shorter})
    return True


def unanswered(one: Round) -> list[dict[str, Any]]:
    """Return the prompts of a round that it has not answered."""
    answered = {row["row"] for row in _sorted(one)}
    return [row for number, row in enumerate(read_all(one.prompts)) if number not in answered]


def _sorted(one: Round) -> list[dict[str, Any]]:
    return sorted(read_all(one.answers), key=lambda row: row["row"])
