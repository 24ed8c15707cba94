"""Acceptance of the draft that vLLM serves now, as its frontend counts it.

``EngineTotals`` are exact, for an engine whose answers have all ended when its draft changes. ``RoundCounter`` leaves
out the answers that were under way: they keep keys and values that another draft has computed, for good.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from spec_core.records import AcceptanceCounters
from spec_kit.hosting import AnswerCounts, AnswerRounds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spec_kit.hosting import Fields

log = logging.getLogger(__name__)


class AcceptanceCounts(Protocol):
    """Counts from a moment on."""

    def begin(self) -> None:
        """Count anew from now on."""
        ...

    def counted(self) -> Fields:
        """Return the counts, by the names of AcceptanceCounters."""
        ...


class EngineTotals:
    """Counts every verification, by vLLM's own counters."""

    def __init__(self) -> None:
        """Count from the start of vLLM's frontend."""
        self._before = AcceptanceCounters()

    def begin(self) -> None:
        """Count anew from now on."""
        self._before = speculation_counters()

    def counted(self) -> Fields:
        """Return the counts, by the names of AcceptanceCounters."""
        return asdict(speculation_counters() - self._before)


class RoundCounter:
    """Counts verifications of the requests alone that vLLM has scheduled for the first time since ``begin``.

    One that yields n tokens has accepted n - 1. The last one of an answer does not count: some of its tokens may be
    cut off, and the request is gone when vLLM calls its loggers.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        """Count from the start of vLLM on."""
        self._num_draft_tokens = num_draft_tokens
        self._begun_s = 0.0
        """Time by ``time.monotonic``, the clock of vLLM's engine core, too."""
        self._running: dict[str, tuple[int, AnswerRounds]] = {}
        """Tokens that each answer had after the last step, and its verifications."""
        self._counts = AnswerCounts()

    def begin(self) -> None:
        """Count anew from now on."""
        self._begun_s = time.monotonic()
        self._counts = AnswerCounts()

    def counted(self) -> Fields:
        """Return the counts, by the names of AcceptanceCounters."""
        return asdict(self._counts.counted(self._num_draft_tokens))

    def note(self, running: Mapping[str, Any], has_verified: bool) -> None:
        """Count a step, which may have verified drafts; ``running`` are vLLM's states of all requests, by name."""
        before, self._running = self._running, {}
        for name, state in running.items():
            if state.stats is None or state.stats.scheduled_ts <= self._begun_s:
                continue
            tokens = state.stats.num_generation_tokens
            known, answer = before.get(name, (0, AnswerRounds()))
            if has_verified and 0 < known < tokens:  # the first token is the prompt's
                answer = self._counts.add(answer, min(tokens - known - 1, self._num_draft_tokens))
            self._running[name] = tokens, answer


def rounds_of(llm: Any) -> RoundCounter:
    """Return a counter that is called after each step of vLLM's.

    It counts nothing where vLLM has no statistics (``--disable-log-stats``) or no draft.
    """
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    class StepLogger(AggregateStatLoggerBase):
        """Hands each step on."""

        def __init__(self) -> None: ...

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            """Count a step of vLLM's."""
            try:
                has_verified = getattr(scheduler_stats, "spec_decoding_stats", None) is not None
                counter.note(llm.output_processor.request_states, has_verified)
            except Exception:  # else every request of the server fails
                log.exception("the acceptance of this server is not counted any more")
                llm.logger_manager.stat_loggers.remove(self)

        def log_engine_initialized(self) -> None:
            """Log nothing."""

    speculation = llm.vllm_config.speculative_config
    counter = RoundCounter(speculation.num_speculative_tokens if speculation else 0)
    if llm.logger_manager is not None:
        llm.logger_manager.stat_loggers.append(StepLogger())
    return counter


def speculation_counters() -> AcceptanceCounters:
    """Return vLLM's own counters since its frontend started."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    prefix = "vllm:spec_decode_num_"
    found = {metric.name.removeprefix(prefix): metric for metric in get_metrics_snapshot()}
    rounds, drafted, accepted = (
        found[name].value if name in found else 0 for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    positions = found.get("accepted_tokens_per_pos")
    return AcceptanceCounters(
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        accepted_per_position=tuple(positions.values) if positions else (),
    )
