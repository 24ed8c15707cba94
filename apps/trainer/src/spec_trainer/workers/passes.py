"""A Pass is an engine's answers to a list of prompts, their duration and the acceptance counters."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spec_core import Engine
from spec_core.records import AcceptanceCounters, Generation, SamplingParams
from spec_trainer.base.waiting import Waiting

_WARM_UP_ROUNDS = 2
"""Rounds that are decoded before the timing starts, because the first use compiles kernels."""
_WARM_UP_SIZES = (1, 2, 3, 4, 8, 16)
"""Batch sizes that are decoded before the timing starts, besides all prompts together. Triton compiles a kernel again
if an integer argument becomes 1, or if its divisibility by 16 changes. With guesses, an argument may be a multiple
of the number of prompts."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The answers of one pass over a list of prompts, its duration, and the engine's counters."""

    answers: list[Generation]
    seconds: float
    counters: AcceptanceCounters = field(default_factory=AcceptanceCounters)
    benchmarks: Mapping[str, Pass] = field(default_factory=dict[str, "Pass"])
    """Name of a benchmark -> its pass, if this pass joins several benchmarks."""

    @classmethod
    def of(cls, passes: Collection[Pass]) -> Pass:
        """Join several passes into one: all answers, and the sums of durations and counters."""
        return cls(
            answers=[answer for one in passes for answer in one.answers],
            seconds=sum(one.seconds for one in passes),
            counters=sum((one.counters for one in passes), AcceptanceCounters()),
        )

    @classmethod
    def joined(cls, benchmarks: Mapping[str, Pass]) -> Pass:
        """Join the passes over several benchmarks into one, which has each of them in ``benchmarks``."""
        return replace(cls.of(benchmarks.values()), benchmarks=benchmarks)

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Token ids of each answer."""
        return [answer.token_ids for answer in self.answers]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def acceptance_length_per_request(self) -> float | None:
        """Mean acceptance length over answers; None if the engine does not count verifications per answer."""
        lengths = [
            answer.acceptance.acceptance_length for answer in self.answers if any(answer.verifications)
        ]
        return sum(lengths) / len(lengths) if lengths else None

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that came from a prefix cache."""
        return sum(answer.cached_tokens for answer in self.answers)


def decode(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, what: str = "decoding"
) -> Pass:
    """Let the engine answer all prompts at once, and measure the time, after a warm-up.

    ``what`` says what is decoded, for those who wait for it.
    """
    with Waiting(f"{what}, warm-up") as waiting:
        warm_up(engine, prompts, sampling)
        waiting.begin(what)
        return decode_warm(engine, prompts, sampling)


def warm_up(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
    """Let the engine decode a few tokens of each answer, so that it is warm when the timing starts.

    An engine in separate processes also decodes few prompts at a time, as when the last answers of a pass end.
    """
    few = min(sampling.max_new_tokens, _WARM_UP_ROUNDS * (1 + sampling.num_draft_tokens))
    most = min(len(prompts), sampling.concurrency or len(prompts))
    sizes = () if engine.abilities.in_process else (size for size in _WARM_UP_SIZES if size < most)
    for size in (*sizes, len(prompts)):
        engine.generate(prompts[:size], replace(sampling, max_new_tokens=few))


def answer_prompts(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> list[Generation]:
    """Return the engine's answers without the tokens after an end token, which would become data (E18)."""
    return [cut_at_end_token(answer, engine, sampling) for answer in engine.generate(prompts, sampling)]


def cut_at_end_token(answer: Generation, engine: Engine, sampling: SamplingParams) -> Generation:
    """Return an engine's answer without the tokens after an end token, if end tokens end it."""
    return answer.up_to(engine.target.eos_token_ids if sampling.stop_at_eos else ())


def decode_warm(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Pass:
    """Let an engine that is already warmed up answer all prompts at once, and measure the time."""
    before = engine.acceptance() if sampling.num_draft_tokens else AcceptanceCounters()
    start = time.perf_counter()
    answers = answer_prompts(engine, prompts, sampling)
    seconds = time.perf_counter() - start
    after = engine.acceptance() if sampling.num_draft_tokens else before
    return Pass(answers=answers, seconds=seconds, counters=after - before)


def pass_seed(*parts: object) -> int:
    """Return the seed of one pass over prompts, of 31 bits; the engine derives a seed for each prompt from it.

    ``parts``: the run's seed, and values that differ between passes.
    """
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
