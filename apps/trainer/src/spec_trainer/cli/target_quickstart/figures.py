"""Measure the draft of a round on held-out prompts, as ``evaluate`` does, and how many guesses serve best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.cli.commands.evaluate import evaluate_draft
from spec_trainer.cli.target_quickstart.folder import Round, read_all, read_document
from spec_trainer.cli.target_quickstart.work import Work
from spec_trainer.measure.evaluation.request import EvaluationRequest

_FEWEST_TOKENS, _MOST_TOKENS = 8, 128
_BATCHED = 6
"""The passes over all prompts at once, greedy and sampled, in units of one answer alone."""
_ROUND = 2.0
"""Time of a round with a draft in units of a token without one, on an accelerator: 2.06 in vLLM 0.26 on an H200."""
_SAFETY = 0.6


def most_s(work: Work) -> float:
    """Return the seconds that the figures take with their longest answers; infinity if no token was timed."""
    if work.folder.cost.exists():
        cost = read_document(work.folder.cost)
        # A token without a draft, and a round with it: the draft's guesses may all be wrong.
        alone_s = (cost["token_ms"] + max(row["round_ms"] for row in cost["rounds"])) / 1000
    elif work.folder.token.exists():
        alone_s = (1 + _ROUND) * read_document(work.folder.token)["token_ms"] / 1000
    else:
        return math.inf
    num_prompts = len(read_all(work.folder.held_out))
    return _MOST_TOKENS * (num_prompts + _BATCHED) * alone_s / _SAFETY


def measure_draft(work: Work, one: Round, limit: TimeLimit) -> dict[str, Any]:
    """Return the document of ``evaluate --json``, with the speed at one answer at a time."""
    longest = _MOST_TOKENS
    if work.folder.cost.exists():
        longest = int(_MOST_TOKENS * max(0.0, limit.left_s) / most_s(work))
    request = EvaluationRequest(
        target=str(work.target.folder),
        draft_model=one.draft,
        prompts=work.folder.held_out,
        engine=work.engine,
        backend=work.machine.backend,
        max_new_tokens=min(max(longest, _FEWEST_TOKENS), _MOST_TOKENS),
        concurrency="1",
        seed=work.request.seed,
    )
    return evaluate_draft(request, work.engine_words)


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
