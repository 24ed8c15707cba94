"""The document of ``evaluate --json``: figures of a workload decoded with a draft and without one."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spec_core.records import Generation, SamplingParams
    from spec_trainer.evaluation.measure import Pass, Passes
    from spec_trainer.evaluation.workload import Workload

log = logging.getLogger(__name__)

_TIE = 0.1
"""Gap of the two largest logits under which bf16 rounding may flip a greedy choice."""
_ENOUGH_TOKENS = 5000
"""Number of generated tokens below which an acceptance length is noise."""
_MOST_LISTED = 20


def summarise(work: Workload, plain: Passes, drafted: Passes) -> dict[str, Any]:
    """Return the figures of ``work.sampling``, the comparison of texts, then every way of decoding by itself."""
    greedy = _figures(work.greedy, plain.greedy, drafted.greedy)
    sampled = None
    if work.sampled is not None and plain.sampled is not None and drafted.sampled is not None:
        sampled = _figures(work.sampled, plain.sampled, drafted.sampled)
    own = sampled if sampled is not None and work.sampling.temperature > 0 else greedy
    if own["generated_tokens"] < _ENOUGH_TOKENS:
        log.warning(
            "%d generated tokens are few, %d or more are advised", own["generated_tokens"], _ENOUGH_TOKENS
        )
    return {
        "num_draft_tokens": work.num_draft_tokens,
        **own,
        **compare(plain.greedy.answers, drafted.greedy.answers),
        "greedy": greedy,
        "sampled": sampled,
        "throughput": _throughput(plain, drafted),
    }


def compare(plain: Sequence[Generation], drafted: Sequence[Generation]) -> dict[str, Any]:
    """Return whether speculation changed the greedy text.

    In a low precision a difference at a near tie is rounding; whether all are is None where the engine gives no gaps.
    In float32 nothing may differ.
    """
    differences = list(_differences(plain, drafted))
    return {
        "outputs_equal": not differences,
        "outputs_differing_share": len(differences) / len(plain),
        "outputs_differing_only_at_ties": _only_ties([gap for _, gap in differences]),
        "first_differences": [
            place | {"top_two_gap": _finite(gap)} for place, gap in differences[:_MOST_LISTED]
        ],
    }


def _only_ties(gaps: Sequence[float | None]) -> bool | None:
    if any(gap is not None and gap >= _TIE for gap in gaps):
        return False
    return None if None in gaps else True


def _finite(gap: float | None) -> float | None:
    return None if gap == math.inf else gap


def _differences(
    plain: Sequence[Generation], drafted: Sequence[Generation]
) -> Iterator[tuple[dict[str, int], float | None]]:
    """Yield where two texts first differ, and the gap of plain decoding there, if it is known.

    The gap is infinite where one text just ends: no rounding explains that.
    """
    for prompt, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        position = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if position is not None:
            gap = one.top2_margin[position] if one.top2_margin else None
            yield {"prompt": prompt, "position": position}, gap
        elif len(one.token_ids) != len(other.token_ids):
            yield {"prompt": prompt, "position": min(len(one.token_ids), len(other.token_ids))}, math.inf


def _figures(sampling: SamplingParams, plain: Pass, drafted: Pass) -> dict[str, Any]:
    counters = drafted.counters
    return {
        "temperature": sampling.temperature,
        "acceptance_length": counters.acceptance_length,
        "acceptance_per_position": counters.acceptance_per_position,
        "drafted": counters.drafted,
        "accepted": counters.accepted,
        "rounds": counters.rounds,
        "generated_tokens": drafted.num_tokens,
        "tokens_per_s": drafted.tokens_per_s,
        "tokens_per_s_without_draft": plain.tokens_per_s,
    }


def _throughput(plain: Passes, drafted: Passes) -> list[dict[str, float]]:
    return [
        {
            "concurrency": size,
            "tokens_per_s": drafted.tokens_per_s[size],
            "tokens_per_s_without_draft": without,
            "speedup": drafted.tokens_per_s[size] / without,
        }
        for size, without in plain.tokens_per_s.items()
    ]
