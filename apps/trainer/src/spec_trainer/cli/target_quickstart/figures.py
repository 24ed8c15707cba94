"""Measure the draft of a round on held-out prompts, as ``evaluate`` does, and how many guesses serve best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from spec_core import Engine, foreign_errors
from spec_core.errors import ArtifactError
from spec_core.foreign import read_bytes
from spec_trainer.base.disk import write_atomically
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.cli.commands.evaluate import evaluate_draft
from spec_trainer.cli.target_quickstart.cost import token_s
from spec_trainer.cli.target_quickstart.folder import Round, read_all, read_document
from spec_trainer.cli.target_quickstart.work import Work
from spec_trainer.measure.evaluation.measure import Passes, decode_without_draft
from spec_trainer.measure.evaluation.prepare import work_on_prompts
from spec_trainer.measure.evaluation.request import EvaluationRequest
from spec_trainer.measure.evaluation.workload import Workload

_FEWEST_TOKENS, _MOST_TOKENS = 8, 128
_BATCHED = 6
"""The passes over all prompts at once, greedy and sampled, in units of one answer alone."""
_ROUND = 2.0
"""Time of a round with a draft in units of a token without one, on an accelerator: 2.06 in vLLM 0.26 on an H200."""
_SAFETY = 0.6


@dataclass(frozen=True, kw_only=True)
class PlainPasses:
    """The passes over the held-out prompts without a draft, and the most tokens of an answer in them."""

    max_new_tokens: int
    passes: Passes


_PLAIN = TypeAdapter(PlainPasses)


def most_s(work: Work) -> float:
    """Return the seconds that the figures take at most; infinity if nothing is measured yet."""
    if work.folder.cost.exists():
        cost = read_document(work.folder.cost)
        # A token without a draft, and a round with it: the draft's guesses may all be wrong.
        alone_s = (cost["token_ms"] + max(row["round_ms"] for row in cost["rounds"])) / 1000
        return _whole_s(work, alone_s)
    if (plain := _plain(work)) is not None:
        return _ROUND * plain.passes.seconds / _SAFETY
    return math.inf


def decode_held_out(work: Work, engine: Engine, one: Round, limit: TimeLimit) -> None:
    """Let a running engine decode the held-out prompts without a draft, so that the figures need no other start.

    If the target is too slow for the time, its answers are shorter.
    """
    draft = work.draft_type(work.draft_type.Config(name=work.request.draft))
    chat = work.options.config.data

    def prompts(max_new_tokens: int) -> Workload:
        request = _request(work, one.draft, max_new_tokens)
        return work_on_prompts(request, work.options, work.target, chat, draft.default_draft_tokens)

    first = prompts(_MOST_TOKENS).prompts[:1]
    longest = _fitting(_whole_s(work, token_s(engine, first)), limit)
    plain = PlainPasses(max_new_tokens=longest, passes=decode_without_draft(engine, prompts(longest)))
    write_atomically(work.folder.plain, _PLAIN.dump_json(plain).decode())


def _plain(work: Work) -> PlainPasses | None:
    """Return what ``decode_held_out`` has written; None if it has not."""
    file = work.folder.plain
    if not file.exists():
        return None
    with foreign_errors(ArtifactError, f"{file} is damaged; remove it, and its prompts are decoded anew"):
        return _PLAIN.validate_json(read_bytes(file, ArtifactError))


def _whole_s(work: Work, token_s: float) -> float:
    """Return the seconds of all passes with the longest answers, if a token of one answer alone takes ``token_s``."""
    return _MOST_TOKENS * (len(read_all(work.folder.held_out)) + _BATCHED) * token_s / _SAFETY


def _fitting(whole_s: float, limit: TimeLimit) -> int:
    """Return how long answers may be for the time that is left, if the longest take ``whole_s``."""
    return min(max(int(_MOST_TOKENS * max(0.0, limit.left_s) / whole_s), _FEWEST_TOKENS), _MOST_TOKENS)


def measure_draft(work: Work, one: Round, limit: TimeLimit) -> dict[str, Any]:
    """Return the document of ``evaluate --json``, with the speed at one answer at a time."""
    if (plain := _plain(work)) is not None:
        request = _request(work, one.draft, plain.max_new_tokens)
        return evaluate_draft(request, work.engine_words, plain.passes)
    request = _request(work, one.draft, _fitting(most_s(work), limit))
    return evaluate_draft(request, work.engine_words)


def _request(work: Work, draft: Path, max_new_tokens: int) -> EvaluationRequest:
    return EvaluationRequest(
        target=str(work.target.folder),
        draft_model=draft,
        prompts=work.folder.held_out,
        engine=work.engine,
        backend=work.machine.backend,
        max_new_tokens=max_new_tokens,
        concurrency="1",
        seed=work.request.seed,
    )


def expected_speedups(cost: Mapping[str, Any], acceptance_per_position: Sequence[float]) -> dict[int, float]:
    """Return number of guesses -> expected speed-up of one answer at a time.

    A round with k guesses yields 1 + the accepted ones among the first k, and takes ``break_even`` tokens' time. Only
    chance can make that less than one token's.
    """
    yields = list(accumulate(acceptance_per_position, initial=1.0))
    return {
        row["num_draft_tokens"]: yields[row["num_draft_tokens"]] / max(1.0, row["break_even"])
        for row in cost["rounds"]
        if row["num_draft_tokens"] < len(yields)
    }
