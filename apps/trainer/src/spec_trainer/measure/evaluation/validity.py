"""Warn of invalid figures of an evaluation: too few tokens, too short a pass, or a used prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spec_core.records import AcceptanceCounters
    from spec_trainer.measure.evaluation.measure import Passes
    from spec_trainer.workers.passes import Pass

_ENOUGH_TOKENS = 5000
"""Number of generated tokens below which an acceptance length is noise."""
_ENOUGH_SECONDS = 1.0
"""Seconds of a pass below which its speed is noise, from the clock, other processes or a cold start."""
_ENOUGH_ROUNDS, _ENOUGH_GUESSED = 100, 1.05
"""Number of verifications needed for a verdict, and the acceptance length below which a draft is useless."""
_ENOUGH_WAVES = 2
"""Smallest ratio of answers to concurrency.

Below it, most answers begin together, and the last ones run at a lower concurrency.
"""


def invalid_figures(plain: Passes, drafted: Passes, own: str) -> Iterator[str]:
    """Yield a warning for each reason why figures are not valid.

    ``own``: "greedy" or "sampled": the kind of decoding whose figures are at the document's top level.
    """
    for way, one, other in (
        ("greedy", plain.greedy, drafted.greedy),
        ("sampled", plain.sampled, drafted.sampled),
    ):
        if one is not None and other is not None:
            yield from _of_pair(way, one, other, own)
    for size, one in drafted.loads.items():
        name = f"concurrency {size}: "
        yield from short_passes(name, plain.loads[size].seconds, one.seconds)
        yield from few_answers(name, len(one.answers), size)
    if cached := _cached_tokens(plain) + _cached_tokens(drafted):
        yield (
            f"tokens of prompts from a prefix cache: {cached}, so that times are not those of a prefill; switch "
            "the engine's prefix cache off"
        )


def _of_pair(way: str, plain: Pass, drafted: Pass, own: str) -> Iterator[str]:
    parts = {f"{name}: ": (plain.benchmarks[name], one) for name, one in drafted.benchmarks.items()}
    if way != own or not parts:
        parts = {"" if way == own else f"{way}: ": (plain, drafted)}
    for name, (one, other) in parts.items():
        yield from unlikely_acceptance(name, other.counters)
        yield from few_tokens(name, other.num_tokens)
        yield from short_passes(name, one.seconds, other.seconds)


def unlikely_acceptance(name: str, counters: AcceptanceCounters) -> Iterator[str]:
    """Yield a warning if no guess of the draft was verified, or almost none was accepted.

    ``name``: the beginning of the warning.
    """
    if not counters.rounds:
        yield f"{name}no verification of a guess was counted, so the acceptance length says nothing"
    elif counters.rounds >= _ENOUGH_ROUNDS and counters.acceptance_length < _ENOUGH_GUESSED:
        yield (
            f"{name}almost no guess was accepted: the draft may be of another target, or hardly trained; "
            "docs/troubleshooting.md helps to see which"
        )


def few_tokens(name: str, number: int) -> Iterator[str]:
    """Yield a warning if ``number`` generated tokens are too few to measure an acceptance length."""
    if number < _ENOUGH_TOKENS:
        yield f"{name}too few generated tokens: {number}, {_ENOUGH_TOKENS} or more are advised"


def short_passes(name: str, *seconds: float) -> Iterator[str]:
    """Yield a warning if passes were too short to measure a speed; ``seconds``: their durations."""
    if min(seconds) < _ENOUGH_SECONDS:
        yield (
            f"{name}a pass took {min(seconds):.2f} s, too short for its speed to count: give more prompts or a "
            "larger --max-new-tokens"
        )


def few_answers(name: str, number: int, concurrency: int) -> Iterator[str]:
    """Yield a warning if ``number`` answers are too few to measure this concurrency."""
    if number < _ENOUGH_WAVES * concurrency and concurrency > 1:
        yield (
            f"{name}too few answers: {number}, of which most begin together and the last have the engine to "
            f"themselves; {_ENOUGH_WAVES * concurrency} or more prompts are advised"
        )


def _cached_tokens(passes: Passes) -> int:
    measured = [passes.greedy, passes.sampled, *passes.loads.values()]
    return sum(one.cached_tokens for one in measured if one is not None)
