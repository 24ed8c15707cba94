"""Build the document of ``evaluate --server --json``: figures of servers with and without a draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from statistics import fmean
from typing import Any

from spec_core.records import AcceptanceCounters
from spec_trainer.measure.evaluation.grading import accuracy
from spec_trainer.measure.evaluation.latency import break_even
from spec_trainer.measure.evaluation.validity import (
    few_answers,
    few_tokens,
    short_passes,
    unlikely_acceptance,
)
from spec_trainer.measure.server.load import ServedPass

Loads = Mapping[int, ServedPass]

_MOST_LISTED = 20


def summarise_servers(
    drafted: Loads, plain: Loads | None, right: Sequence[Decimal | str | None], is_greedy: bool
) -> dict[str, Any]:
    """Return the document with the figures of a server with a draft.

    ``drafted``: concurrency -> pass. ``plain``: the same for the server without a draft, if there is one. ``right``:
    the number that is the right answer of each question; None for a question without such a number.
    """
    acceptance = _acceptance(drafted)
    throughput = [_entry(size, one, None if plain is None else plain[size]) for size, one in drafted.items()]
    counts = acceptance or AcceptanceCounters()
    return {
        "acceptance_length": acceptance and acceptance.acceptance_length,
        "acceptance_length_per_request": _per_request(drafted),
        "acceptance_per_position": counts.acceptance_per_position,
        "rounds": acceptance and acceptance.rounds,
        "drafted": counts.drafted or None,
        "accepted": acceptance and acceptance.accepted,
        "generated_tokens": sum(one.num_tokens for one in drafted.values()),
        "warnings": [*_warnings(drafted, plain, acceptance)],
        **_compare(drafted, plain if is_greedy else None),
        "accuracy": _accuracy(drafted, right),
        "accuracy_without_draft": None if plain is None else _accuracy(plain, right),
        "throughput": throughput,
        "break_even_concurrency": None if plain is None else break_even(throughput),
    }


def _entry(size: int, drafted: ServedPass, plain: ServedPass | None) -> dict[str, Any]:
    return {
        "concurrency": size,
        "tokens_per_s": drafted.tokens_per_s,
        "tokens_per_s_without_draft": plain and plain.tokens_per_s,
        "speedup": plain and drafted.tokens_per_s / plain.tokens_per_s,
        "with_draft": drafted.describe(),
        "without_draft": plain and plain.describe(),
    }


def _acceptance(loads: Loads) -> AcceptanceCounters | None:
    """Return the acceptance counters summed over all passes; None if a pass has none, or they went back."""
    total = AcceptanceCounters()
    for one in loads.values():
        if one.counted is None or one.counted.acceptance is None or one.counted.generated_tokens < 0:
            return None
        total += one.counted.acceptance
    return total


def _per_request(loads: Loads) -> float | None:
    """Return the mean of the answers' own acceptance lengths; None if the server does not report them."""
    reported = [answer.acceptance_length for one in loads.values() for answer in one.answers]
    lengths = [length for length in reported if length is not None]
    return fmean(lengths) if lengths else None


def _compare(drafted: Loads, plain: Loads | None) -> dict[str, Any]:
    """Return whether the greedy texts of both servers are equal, and where they differ first.

    Only the smallest concurrency is compared. If ``plain`` is None, nothing is compared.
    """
    if plain is None:
        return {"outputs_equal": None, "outputs_differing_share": None, "first_differences": []}
    smallest = min(drafted)
    pairs = [
        (one.text, other.text)
        for one, other in zip(plain[smallest].answers, drafted[smallest].answers, strict=True)
    ]
    differing = [place for place, (one, other) in enumerate(pairs) if one != other]
    return {
        "outputs_equal": not differing,
        "outputs_differing_share": len(differing) / len(pairs),
        "first_differences": [
            {"prompt": place, "character": _first_difference(*pairs[place])}
            for place in differing[:_MOST_LISTED]
        ],
    }


def _accuracy(loads: Loads, right: Sequence[Decimal | str | None]) -> float | None:
    """Return the share of right answers at the smallest concurrency; None if no right answer is known."""
    answers = loads[min(loads)].answers[: len(right)]
    return accuracy([answer.text for answer in answers], right)


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _warnings(drafted: Loads, plain: Loads | None, acceptance: AcceptanceCounters | None) -> Iterator[str]:
    if acceptance is not None:
        yield from unlikely_acceptance("", acceptance)
    yield from few_tokens("", sum(one.num_tokens for one in drafted.values()))
    for size, one in drafted.items():
        name = f"concurrency {size}: "
        seconds = [one.seconds] if plain is None else [one.seconds, plain[size].seconds]
        yield from short_passes(name, *seconds)
        yield from few_answers(name, len(one.answers), size)
    yield from _of_counts("the server", list(drafted.values()))
    if plain is not None:
        yield from _of_counts("the baseline server", list(plain.values()))
        if (baseline := _acceptance(plain)) is not None and baseline.rounds:
            yield "the baseline server speculates, too: start it without a draft"


def _of_counts(who: str, passes: Sequence[ServedPass]) -> Iterator[str]:
    counted = [(one, one.counted) for one in passes if one.counted is not None]
    generated = sum(counts.generated_tokens for _, counts in counted)
    ours = sum(one.num_tokens for one, _ in counted)
    if generated > ours:
        yield (
            f"tokens that {who} has generated meanwhile: {generated}, {ours} of them for this command: its counters "
            "and its speed are of other requests, too"
        )
    if generated < ours:
        yield (
            f"tokens that {who} has counted: {generated} of {ours}: its counters are not whole; has it started anew, "
            "or do several servers share its address?"
        )
    if (cached := sum(counts.cached_tokens for _, counts in counted)) > 0:
        yield (
            f"tokens of prompts from a prefix cache of {who}: {cached}, so that times are not those of a prefill"
        )
