"""Measure the draft of a round on held-out prompts, as ``evaluate`` does, and how many guesses serve best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from spec_trainer.cli.target_quickstart.folder import Round, read_all, read_document
from spec_trainer.cli.target_quickstart.work import Work
from spec_trainer.measure.evaluation.measure import Passes, decode_without_draft
from spec_trainer.measure.evaluation.prepare import work_on_prompts
from spec_trainer.measure.evaluation.request import EvaluationRequest

_FEWEST_TOKENS, _MOST_TOKENS = 8, 128
_BATCHED = 6
"""The passes over all prompts at once, greedy and sampled, in units of one answer alone."""
_ROUND = 2.0
"""Time of a round with a draft in units of a token without one, on an accelerator: 2.06 in vLLM 0.26 on an H200."""
_PASSES = TypeAdapter(Passes)
_SAFETY = 0.6


def most_s(work: Work) -> float:
    """Return the seconds that the figures take at most; infinity if nothing is measured yet."""
    if work.folder.cost.exists():
        cost = read_document(work.folder.cost)
        # A token without a draft, and a round with it: the draft's guesses may all be wrong.
        alone_s = (cost["token_ms"] + max(row["round_ms"] for row in cost["rounds"])) / 1000
        num_prompts = len(read_all(work.folder.held_out))
        return _MOST_TOKENS * (num_prompts + _BATCHED) * alone_s / _SAFETY
    if (plain := _passes(work)) is not None:
        return _ROUND * plain.seconds / _SAFETY
    return math.inf


def decode_held_out(work: Work, engine: Engine, one: Round) -> None:
    """Let a running engine decode the held-out prompts without a draft, so that the figures need no other start."""
    request = _request(work, one.draft, _MOST_TOKENS)
    draft = work.draft_type(work.draft_type.Config(name=work.request.draft))
    chat = work.options.config.data
    prompts = work_on_prompts(request, work.options, work.target, chat, draft.default_draft_tokens)
    passes = decode_without_draft(engine, prompts)
    write_atomically(work.folder.plain, _PASSES.dump_json(passes).decode())


def _passes(work: Work) -> Passes | None:
    """Return the passes that ``decode_held_out`` has written; None if there are none."""
    file = work.folder.plain
    if not file.exists():
        return None
    with foreign_errors(ArtifactError, f"{file} is damaged; remove it, and they are decoded anew"):
        return _PASSES.validate_json(read_bytes(file, ArtifactError))


def measure_draft(work: Work, one: Round, limit: TimeLimit) -> dict[str, Any]:
    """Return the document of ``evaluate --json``, with the speed at one answer at a time."""
    longest = _MOST_TOKENS
    if work.folder.cost.exists():
        longest = int(_MOST_TOKENS * max(0.0, limit.left_s) / most_s(work))
    request = _request(work, one.draft, min(max(longest, _FEWEST_TOKENS), _MOST_TOKENS))
    return evaluate_draft(request, work.engine_words, _passes(work))


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
