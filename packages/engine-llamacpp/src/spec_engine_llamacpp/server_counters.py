"""Read the counters of a running llama.cpp server, started with ``--metrics``, from its Prometheus metrics."""

from __future__ import annotations

from spec_core.records import ServerCounters
from spec_kit.live_traffic import ServerMetrics


def llamacpp_counters(text: str) -> ServerCounters | None:
    """Return the counters in the metrics of a llama.cpp server; None for the metrics of another program.

    The server has no histogram of latencies.
    """
    metrics = ServerMetrics(text)
    generated = metrics.total("llamacpp:tokens_predicted_total")
    if generated is None:
        return None
    acceptance = metrics.acceptance("llamacpp")
    return ServerCounters(
        generated_tokens=generated,
        cached_tokens=metrics.total("llamacpp:prompt_tokens_cached_total") or 0,
        acceptance=acceptance if acceptance and acceptance.rounds else None,  # 0 without a draft
    )
