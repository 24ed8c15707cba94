"""Read the counters of a running llama.cpp server, started with ``--metrics``, from its Prometheus metrics."""

from __future__ import annotations

from spec_core.records import AcceptanceCounters, ServerCounters
from spec_kit.live_traffic import ServerMetrics

_SPECULATION = "llamacpp:spec_decode_num_"
_MOST_POSITIONS = 1024


def llamacpp_counters(text: str) -> ServerCounters | None:
    """Return the counters in the metrics of a llama.cpp server; None for the metrics of another program.

    The server has no histogram of latencies.
    """
    metrics = ServerMetrics(text)
    generated = metrics.total("llamacpp:tokens_predicted_total")
    if generated is None:
        return None
    return ServerCounters(
        generated_tokens=generated,
        cached_tokens=metrics.total("llamacpp:prompt_tokens_cached_total") or 0,
        acceptance=_acceptance(metrics),
    )


def _acceptance(metrics: ServerMetrics) -> AcceptanceCounters | None:
    """Return the counters of verifications; a server without a draft counts none."""
    rounds = metrics.total(f"{_SPECULATION}drafts_total")
    if not rounds:
        return None
    by_position = metrics.by_label(f"{_SPECULATION}accepted_tokens_per_pos_total", "position")
    counts = [by_position.get(str(position), 0) for position in range(min(len(by_position), _MOST_POSITIONS))]
    return AcceptanceCounters(
        rounds=rounds,
        drafted=metrics.total(f"{_SPECULATION}draft_tokens_total") or 0,
        accepted=metrics.total(f"{_SPECULATION}accepted_tokens_total") or 0,
        accepted_per_position=tuple(counts),
    )
