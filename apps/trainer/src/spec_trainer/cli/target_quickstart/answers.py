"""Let the target answer the prompts of a round until its time is over, as ``regenerate`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_core.errors import RunError
from spec_trainer.cli.commands.regenerate import regenerate_answers
from spec_trainer.cli.target_quickstart.folder import read_all, read_document, write_document, write_rows
from spec_trainer.cli.target_quickstart.recipe import answer_tokens
from spec_trainer.measure.regeneration.request import RegenerationRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_trainer.base.time_limit import TimeLimit
    from spec_trainer.cli.target_quickstart.folder import Round
    from spec_trainer.cli.target_quickstart.work import Work

_FEWEST = 2
"""Number of answers without which nothing can be trained and nothing held out."""


def answer_round(work: Work, one: Round, earlier: Sequence[Round], limit: TimeLimit) -> None:
    """Answer prompts until the time is over; write the training data, with the answers of ``earlier`` rounds.

    Raise RunError if there are hardly any answers.
    """
    if not one.answer_settings.exists():  # a later call has to answer by the same ones
        token_s = read_document(work.folder.cost)["token_ms"] / 1000
        num_prompts = len(read_all(one.prompts))
        longest = answer_tokens(limit.left_s, token_s, num_prompts, work.lengths.answer)
        write_document(one.answer_settings, {"max_new_tokens": longest})
    request = RegenerationRequest(
        target=str(work.target.folder),
        data=str(one.prompts),
        output=one.answers,
        engine=work.request.engine,
        backend=work.machine.backend,
        max_new_tokens=read_document(one.answer_settings)["max_new_tokens"],
        seed=work.request.seed,
        on_bad_row="skip",
    )
    regenerate_answers(request, work.engine_words, limit)
    rows = [*(read_all(earlier[-1].training) if earlier else ()), *_sorted(one)]
    if len(rows) < _FEWEST:
        raise RunError(
            f"the target gave {len(rows)} answers in its share of the budget; give a larger --budget, and the same "
            "command goes on"
        )
    write_rows(one.training, rows)


def unanswered(one: Round) -> list[dict[str, Any]]:
    """Return the prompts of a round that it has not answered."""
    answered = {row["row"] for row in _sorted(one)}
    return [row for number, row in enumerate(read_all(one.prompts)) if number not in answered]


def _sorted(one: Round) -> list[dict[str, Any]]:
    return sorted(read_all(one.answers), key=lambda row: row["row"])
