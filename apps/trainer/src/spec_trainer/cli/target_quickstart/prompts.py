"""The prompts of a round: rows of the user's data, or texts that the target writes as a user.

A chat model continues the text before a user's question with a question like those that it was trained on. So the
chat template's beginning is enough to sample prompts from the target itself: Magpie, Xu et al., arXiv 2406.08464.
"""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_core.errors import DataError
from spec_core.records import GenerationRequest, SamplingParams
from spec_trainer.data.errors import BadRow, UnusableTemplate
from spec_trainer.data.rows import Chat
from spec_trainer.data.sources import read_rows
from spec_trainer.measure.regeneration.conversation import open_conversation
from spec_trainer.workers.passes import cut_at_end_token, pass_seed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from spec_core import Engine
    from spec_core.records import Generation
    from spec_trainer.base.time_limit import TimeLimit
    from spec_trainer.cli.target_quickstart.engine import AnsweringEngine
    from spec_trainer.cli.target_quickstart.kept_questions import KeptQuestions
    from spec_trainer.cli.target_quickstart.work import Work
    from spec_trainer.data.tokens import Encoder

Row = dict[str, Any]

THE_TARGET = "the target itself"
"""The source of prompts that the target has written."""
_MARK = "QUESTIONMARKED"
"""A text in place of a question, by which the text before a question is found."""
_ADD_TEMPLATE = "put a chat_template.jinja there, or give --data with rows of text"
_LONGEST_QUESTION = 128
"""Largest number of tokens of a question that the target writes; an unfinished one is left out."""


@dataclass
class PromptCounts:
    """How many prompts were made, and how many of them were left out."""

    source: str
    """The data, or ``THE_TARGET``."""
    position: int = 0
    """Number of rows or samples that this and all earlier rounds have taken."""
    taken: int = 0
    """Number of rows or samples that this round has taken."""
    repeated: int = 0
    """Rows with the same prompt as an earlier one, or samples with the same words."""
    unfinished: int = 0
    """Samples without an end."""
    unusable: int = 0
    """Rows or samples that are empty, too long or malformed."""

    def as_document(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def check_source(work: Work) -> None:
    """Raise DataError if the data cannot be read, or if it or the target's prompts need a missing chat template."""
    data = work.request.data
    if data is not None:
        for row in islice(read_rows(data), 1):
            _prompt(work, row.content)
        return
    try:
        question_prefix(work.encoder)
    except UnusableTemplate as error:
        problem = f"{error.problem}; {_ADD_TEMPLATE}"
        raise DataError(f"without --data the target writes the prompts, but {problem}") from error
    except DataError as error:
        raise DataError(
            f"without --data the target writes the prompts, but {error}; or give --data"
        ) from error


@dataclass(frozen=True)
class QuestionPrefix:
    """QuestionPrefix has the tokens that the chat template writes around a user's first question."""

    token_ids: Sequence[int]
    """The tokens before the question."""
    end: int | None
    """The token behind the question, if it begins where the question ends."""


def question_prefix(encoder: Encoder) -> QuestionPrefix:
    """Return the tokens around a question. Raise DataError if the template is missing or hides the question."""
    chat = Chat([{"role": "user", "content": _MARK}])
    opening = encoder.opening(chat, chat.messages)
    start = opening.text.find(_MARK)
    before = int(np.count_nonzero(opening.offsets[:, 1] <= start))
    if start < 1 or before == 0:
        raise DataError("the chat template writes nothing before a question, or no question")
    after = np.flatnonzero(opening.offsets[:, 0] == start + len(_MARK))
    return QuestionPrefix(opening.input_ids[:before], opening.input_ids[after[0]] if len(after) else None)


def rows_of_data(
    work: Work, asked: Iterable[Row], position: int, wanted: int
) -> tuple[list[Row], PromptCounts]:
    """Return the new ones of ``wanted`` rows of the data, from place ``position`` of a random order of all rows.

    ``asked``: the rows of earlier rounds and the held-out ones.
    """
    data = work.request.data
    assert data is not None, "the user gave data"
    order = list(range(sum(1 for _ in read_rows(data))))
    random.Random(work.request.seed).shuffle(order)
    chosen = {number: place for place, number in enumerate(order[position : position + wanted])}
    counts = PromptCounts(source=data, position=position + len(chosen), taken=len(chosen))
    found: dict[int, Row] = {}
    seen = {_prompt(work, row) for row in asked}
    for number, row in enumerate(read_rows(data)):
        if number not in chosen:
            continue
        prompt = _prompt(work, row.content)
        if prompt is None:
            counts.unusable += 1
        elif prompt in seen:
            counts.repeated += 1
        else:
            seen.add(prompt)
            found[chosen[number]] = dict(row.content)
    return [found[place] for place in sorted(found)], counts


def _prompt(work: Work, content: Any) -> tuple[object, ...] | None:
    """Return the tokens and images of a row's first prompt; None for a row that cannot be answered."""
    try:
        opened = open_conversation(content, work.encoder, work.target.eos_token_ids, work.lengths.prompt)
    except BadRow:
        return None
    except UnusableTemplate as error:
        raise DataError(f"{error.problem}; {_ADD_TEMPLATE}") from error
    return *opened.prompt, *(image.digest for image in opened.sources)


def sample_questions(
    work: Work,
    engine: AnsweringEngine,
    known: Collection[str],
    kept: KeptQuestions,
    wanted: int,
    limit: TimeLimit,
) -> tuple[list[Row], PromptCounts]:
    """Let the target write questions until ``wanted`` are there or the time is over.

    ``known``: the words of questions of earlier rounds (``words_of``). ``kept``: those of this round that are there.
    ``limit``: begins, unless it has begun, with the first question, because an engine may start slowly.
    """
    prefix = question_prefix(work.encoder)
    counts = kept.counts
    samples = _samples(engine.started(), prefix, work, counts, limit)
    texts = ((work.encoder.decode(ids), ended) for ids, ended in samples)
    known = {*known, *(words_of(row["messages"][0]["content"]) for row in kept.rows)}
    fresh = kept.add(distinct_questions(texts, known, counts))
    rows = [*kept.rows, *islice(fresh, max(0, wanted - len(kept.rows)))]
    usable = [row for row in rows if _prompt(work, row) is not None]
    counts.unusable += len(rows) - len(usable)
    return usable, counts


def distinct_questions(
    samples: Iterable[tuple[str, bool]], known: Collection[str], counts: PromptCounts
) -> Iterator[Row]:
    """Yield a conversation for each sample that is new and has an end; count the others.

    ``samples``: texts, and whether each has an end. ``known``: the words of earlier questions (``words_of``).
    """
    seen = set(known)
    for text, ended in samples:
        counts.taken += 1
        words = words_of(text)
        if not ended:
            counts.unfinished += 1
        elif not words:
            counts.unusable += 1
        elif words in seen:
            counts.repeated += 1
        else:
            seen.add(words)
            yield {"messages": [{"role": "user", "content": text.strip()}]}


def _samples(
    engine: Engine, prefix: QuestionPrefix, work: Work, counts: PromptCounts, limit: TimeLimit
) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens of each sample without its end token, and whether it had one, until the time is over."""
    sampling = SamplingParams(
        max_new_tokens=min(_LONGEST_QUESTION, work.lengths.prompt),
        temperature=1.0,
        with_margins=False,
    )

    def next_request() -> GenerationRequest | None:
        if limit.is_over:
            return None
        counts.position += 1
        seeded = work.machine.is_cpu  # vLLM on a GPU draws seeded rows one by one
        seed = pass_seed(work.request.seed, "question", counts.position) if seeded else None
        return GenerationRequest(prompt=prefix.token_ids, seed=seed)

    for _, answer in engine.generate_unordered(next_request, sampling):
        limit.begin()
        yield _question(cut_at_end_token(answer, engine, sampling), prefix, work)
        if limit.is_over:  # answers that are under way are dropped
            return


def _question(answer: Generation, prefix: QuestionPrefix, work: Work) -> tuple[list[int], bool]:
    ends = {*work.target.eos_token_ids} | ({prefix.end} - {None})
    ids = list(answer.token_ids)
    place = next((place for place, token in enumerate(ids) if token in ends), None)
    return ids[:place], place is not None


def words_of(text: str) -> str:
    """Return the words of a text in lower case, by which equal questions are found."""
    return " ".join(re.findall(r"\w+", text.casefold()))
