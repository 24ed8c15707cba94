"""Measure a server's answers to questions at one concurrency; a ServedPass has the results."""

from __future__ import annotations

import itertools
import logging
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_core.errors import EngineError
from spec_trainer.measure.evaluation.latency import describe_times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_core.records import ServerCounters
    from spec_trainer.measure.server.openai_server import OpenAiServer, ServedAnswer
    from spec_trainer.measure.server.questions import Question

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 8
"""Number of tokens of each warm-up answer, before the timing starts."""
_SETTLING_S, _LOOK_S = 5.0, 0.1
"""Longest wait until a server's counters are up to date, and the time between two reads, in seconds.

Counters may be updated after the answers arrive if the engine counts in another process than the process
that serves HTTP.
"""


@dataclass(frozen=True, kw_only=True)
class ServedPass:
    """Answers of one pass over questions, its duration, and the increase of the server's counters."""

    answers: list[ServedAnswer]
    seconds: float
    counted: ServerCounters | None

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.seconds

    def describe(self) -> dict[str, Any]:
        """Return speed and latencies, in the format of ``describe_load``."""
        timed = [answer.times for answer in self.answers if answer.times is not None]
        return {"tokens_per_s": self.tokens_per_s, **describe_times(timed)}


def measure_load(
    server: OpenAiServer, questions: Sequence[Question], options: Mapping[str, Any], concurrency: int
) -> ServedPass:
    """Send every question, ``concurrency`` at a time, and measure the pass after a warm-up.

    If there are fewer questions than ``concurrency``, they are repeated.
    """
    asked = list(itertools.islice(itertools.cycle(questions), max(concurrency, len(questions))))
    _warm_up(server, asked[:concurrency], options)
    log.info("timing answers (%d), concurrency %d, of %s", len(asked), concurrency, server.url)
    before = server.counters()
    start = time.perf_counter()
    answers = ask_at_once(server, asked, options, concurrency)
    seconds = time.perf_counter() - start
    if not any(answer.num_tokens for answer in answers):
        raise EngineError(
            f"{server.url} says that its answers have no tokens ({len(answers)}), so it has no speed: ask others"
        )
    counted = None if before is None else _counted_since(server, before, answers)
    return ServedPass(answers=answers, seconds=seconds, counted=counted)


def ask_at_once(
    server: OpenAiServer, questions: Sequence[Question], options: Mapping[str, Any], concurrency: int
) -> list[ServedAnswer]:
    """Send the questions, at most ``concurrency`` at a time; return the answers in the same order.

    If a request fails, cancel all others, close the server's client, and raise the error.
    """
    with ThreadPoolExecutor(concurrency, thread_name_prefix="asking") as pool:
        asked = [pool.submit(server.answer, question, options) for question in questions]
        try:
            ended, _ = wait(asked, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            server.close()
            raise
    return [future.result() for future in asked]


def _warm_up(server: OpenAiServer, questions: Sequence[Question], options: Mapping[str, Any]) -> None:
    """Request a few tokens of each answer, all at once, before the timing starts."""
    few = min(_WARM_UP_TOKENS, options["max_tokens"])
    ask_at_once(server, questions, {**options, "max_tokens": few}, len(questions))


def _counted_since(
    server: OpenAiServer, before: ServerCounters, answers: Sequence[ServedAnswer]
) -> ServerCounters | None:
    """Return the increase of the server's counters since ``before``; None if they cannot be read.

    Wait up to ``_SETTLING_S`` seconds until the counters include every token of ``answers``.
    """
    generated = sum(answer.num_tokens for answer in answers)
    deadline = time.monotonic() + _SETTLING_S
    while (after := server.counters()) is not None:
        counted = after - before
        if counted.generated_tokens >= generated or time.monotonic() > deadline:
            return counted
        time.sleep(_LOOK_S)
    return None
