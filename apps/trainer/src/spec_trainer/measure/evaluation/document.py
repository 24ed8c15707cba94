"""Build the document of ``evaluate --json``: figures of a workload decoded with and without a draft."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spec_trainer.measure.evaluation.grading import accuracy
from spec_trainer.measure.evaluation.latency import break_even, describe_loads
from spec_trainer.measure.evaluation.validity import invalid_figures

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from decimal import Decimal

    from spec_core.records import Generation
    from spec_trainer.measure.evaluation.measure import Passes
    from spec_trainer.measure.evaluation.sweep import Sweep
    from spec_trainer.measure.evaluation.workload import Workload
    from spec_trainer.workers.passes import Pass

log = logging.getLogger(__name__)

_TIE = 0.1
"""Difference of the two largest logits below which bfloat16 rounding may change the greedy token."""
_MOST_LISTED = 20


Decode = Callable[[Sequence[int]], str]
"""A function that returns the text of token ids."""


def summarise(
    work: Workload,
    plain: Passes,
    drafted: Passes,
    decode: Decode | None = None,
    sweep: Sweep | None = None,
) -> dict[str, Any]:
    """Return the document with the figures of greedy and of sampled decoding, and a comparison of texts.

    The figures at its top level belong to ``work.sampling``. ``plain`` and ``drafted``: the passes without and with
    the draft. ``decode``: turns token ids into text; if it is given, answers to questions with a right number are
    graded. ``sweep``: the passes with several numbers of draft tokens, if there were any.
    """
    greedy = _figures(work.greedy.temperature, plain.greedy, drafted.greedy)
    sampled = None
    if work.sampled is not None and plain.sampled is not None and drafted.sampled is not None:
        sampled = _figures(work.sampled.temperature, plain.sampled, drafted.sampled)
    temperature = work.sampling.temperature
    both = (plain.own(work), drafted.own(work))
    warnings = list(invalid_figures(plain, drafted, "sampled" if temperature > 0 else "greedy"))
    if sweep is not None:
        warnings += sweep.warnings()
    for warning in warnings:
        log.warning("%s", warning)
    throughput = describe_loads(plain.loads, drafted.loads)
    return {
        "num_draft_tokens": work.num_draft_tokens,
        **_figures(temperature, *both),
        "warnings": warnings,
        "benchmarks": _benchmarks(temperature, *both, _graders(work, decode)),
        **compare(plain.greedy.answers, drafted.greedy.answers),
        "greedy": greedy,
        "sampled": sampled,
        "throughput": throughput,
        "break_even_concurrency": break_even(throughput),
        "sweep": None if sweep is None else sweep.describe(),
    }


def compare(plain: Sequence[Generation], drafted: Sequence[Generation]) -> dict[str, Any]:
    """Compare greedy texts that were decoded with a draft (``drafted``) and without it (``plain``).

    In low precision, a difference is due to rounding if the two largest logits are nearly equal at the first
    different token. In float32 nothing may differ. The figure ``outputs_differing_only_at_ties`` says whether
    rounding explains all differences; it is None if the engine does not report the gap between the logits.
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
    """Yield where each pair of different texts differs first, and the gap of the two largest logits there.

    The gap is measured without the draft; None if it is unknown. It is infinite if one text is the beginning
    of the other, because rounding cannot explain that.
    """
    for prompt, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        position = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if position is not None:
            gap = one.top2_margin[position] if one.top2_margin else None
            yield {"prompt": prompt, "position": position}, gap
        elif len(one.token_ids) != len(other.token_ids):
            yield {"prompt": prompt, "position": min(len(one.token_ids), len(other.token_ids))}, math.inf


def _graders(work: Workload, decode: Decode | None) -> dict[str, Callable[[Pass], float | None]]:
    """Return, for each benchmark, a function that grades a pass over it; empty without ``decode``."""
    right: dict[str, list[Decimal | str | None]] = {}
    for name, number in zip(work.benchmarks, work.right, strict=False):
        right.setdefault(name, []).append(number)

    def grader(numbers: Sequence[Decimal | str | None], decode: Decode) -> Callable[[Pass], float | None]:
        return lambda one: accuracy([decode(answer.token_ids) for answer in one.answers], numbers)

    return {} if decode is None else {name: grader(numbers, decode) for name, numbers in right.items()}


def _benchmarks(
    temperature: float, plain: Pass, drafted: Pass, graders: Mapping[str, Callable[[Pass], float | None]]
) -> dict[str, dict[str, Any]]:
    def graded(name: str, one: Pass) -> float | None:
        return graders[name](one) if name in graders else None

    return {
        name: {
            "prompts": len(one.answers),
            **_figures(temperature, plain.benchmarks[name], one),
            "outputs_equal": plain.benchmarks[name].texts == one.texts,
            "accuracy": graded(name, one),
            "accuracy_without_draft": graded(name, plain.benchmarks[name]),
        }
        for name, one in drafted.benchmarks.items()
    }


def _figures(temperature: float, plain: Pass, drafted: Pass) -> dict[str, Any]:
    counters = drafted.counters
    return {
        "temperature": temperature,
        "acceptance_length": counters.acceptance_length,
        "acceptance_length_per_request": drafted.acceptance_length_per_request,
        "acceptance_per_position": counters.acceptance_per_position,
        "drafted": counters.drafted,
        "accepted": counters.accepted,
        "rounds": counters.rounds,
        "generated_tokens": drafted.num_tokens,
        "tokens_per_s": drafted.tokens_per_s,
        "tokens_per_s_without_draft": plain.tokens_per_s,
        "speedup": drafted.tokens_per_s / plain.tokens_per_s,
    }
