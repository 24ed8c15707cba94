"""Count the accepted guesses of the draft that vLLM serves now, in vLLM's frontend.

``EngineTotals`` is exact if no answer is running when the draft changes. ``RoundCounter`` leaves out answers
that were running at the change, because their KV cache has keys and values of the previous draft.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from spec_core.records import AcceptanceCounters
from spec_kit.hosting import AnswerCounts, AnswerRounds, Fields

log = logging.getLogger(__name__)


class AcceptanceCounts(Protocol):
    """Interface of acceptance counters that can be restarted."""

    def begin(self) -> None:
        """Restart the counters."""
        ...

    def counted(self) -> Fields:
        """Return the counts as a dict with the fields of AcceptanceCounters."""
        ...


class EngineTotals:
    """Counts every verification since ``begin``, from vLLM's own counters."""

    def __init__(self) -> None:
        """Count everything since the start of vLLM's frontend."""
        self._before = AcceptanceCounters()

    def begin(self) -> None:
        """Restart the counters."""
        self._before = speculation_counters()

    def counted(self) -> Fields:
        """Return the counts as a dict with the fields of AcceptanceCounters."""
        return asdict(speculation_counters() - self._before)


class RoundCounter:
    """Counts only verifications of requests that vLLM has scheduled for the first time since ``begin``.

    A verification that yields n tokens has accepted n - 1 guesses. An answer's last verification is not counted: some
    of its tokens may be cut off, and the request no longer exists when vLLM calls its loggers.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        """Count everything since the start of vLLM."""
        self._num_draft_tokens = num_draft_tokens
        self._begun_s = 0.0
        """Time of the last call of ``begin`` by ``time.monotonic``, which is also the clock of vLLM's engine
        core."""
        self._running: dict[str, tuple[int, AnswerRounds]] = {}
        """Request name → number of the answer's tokens after the latest step, and the answer's
        verifications."""
        self._counts = AnswerCounts()

    def begin(self) -> None:
        """Restart the counters."""
        self._begun_s = time.monotonic()
        self._counts = AnswerCounts()

    def counted(self) -> Fields:
        """Return the counts as a dict with the fields of AcceptanceCounters."""
        return asdict(self._counts.counted(self._num_draft_tokens))

    def note(self, running: Mapping[str, Any], has_verified: bool) -> None:
        """Count one step of vLLM. ``running``: vLLM's state of each request, by name.

        ``has_verified``: whether the step verified drafts.
        """
        before, self._running = self._running, {}
        for name, state in running.items():
            if state.stats is None or state.stats.scheduled_ts <= self._begun_s:
                continue
            tokens = state.stats.num_generation_tokens
            known, answer = before.get(name, (0, AnswerRounds()))
            if has_verified and 0 < known < tokens:  # the prefill yields the first token
                answer = self._counts.add(answer, min(tokens - known - 1, self._num_draft_tokens))
            self._running[name] = tokens, answer


def rounds_of(llm: Any) -> RoundCounter:
    """Return a RoundCounter that is called after each of vLLM's steps.

    It counts nothing if vLLM has no statistics (``--disable-log-stats``) or no draft.
    """
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase

    class StepLogger(AggregateStatLoggerBase):
        """A vLLM statistics logger that passes each step to the counter."""

        def __init__(self) -> None: ...

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            """Count one step of vLLM."""
            try:
                has_verified = getattr(scheduler_stats, "spec_decoding_stats", None) is not None
                counter.note(llm.output_processor.request_states, has_verified)
            except Exception:  # an exception here would fail every request of the server
                log.exception("the acceptance of this server is not counted any more")
                llm.logger_manager.stat_loggers.remove(self)

        def log_engine_initialized(self) -> None:
            """Do nothing: vLLM requires the method, but there is nothing to log."""

    speculation = llm.vllm_config.speculative_config
    counter = RoundCounter(speculation.num_speculative_tokens if speculation else 0)
    if llm.logger_manager is not None:
        llm.logger_manager.stat_loggers.append(StepLogger())
    return counter


def speculation_counters() -> AcceptanceCounters:
    """Return vLLM's own acceptance counters since its frontend started."""
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
