"""Read the counters of a running vLLM server (vLLM 0.26 to 0.33) from its Prometheus metrics."""

from __future__ import annotations

from spec_core.records import ServerCounters
from spec_kit.live_traffic import ServerMetrics


def vllm_counters(text: str) -> ServerCounters | None:
    """Return the counters in the metrics of a vLLM server; None for the metrics of another program."""
    metrics = ServerMetrics(text)
    generated = metrics.total("vllm:generation_tokens_total")
    if generated is None:
        return None
    return ServerCounters(
        generated_tokens=generated,
        cached_tokens=metrics.total("vllm:prefix_cache_hits_total") or 0,
        acceptance=metrics.acceptance("vllm"),  # counted only by a vLLM that was started with a draft
        inter_token_latency=metrics.histogram("vllm:inter_token_latency_seconds"),
    )
