"""Read the counters of a running vLLM server (vLLM 0.26 to 0.33) from its Prometheus metrics."""

from __future__ import annotations

from spec_core.records import AcceptanceCounters, ServerCounters
from spec_kit.live_traffic import ServerMetrics

_SPECULATION = "vllm:spec_decode_num_"
_MOST_POSITIONS = 1024


def vllm_counters(text: str) -> ServerCounters | None:
    """Return the counters in the metrics of a vLLM server; None for the metrics of another program."""
    metrics = ServerMetrics(text)
    generated = metrics.total("vllm:generation_tokens_total")
    if generated is None:
        return None
    return ServerCounters(
        generated_tokens=generated,
        cached_tokens=metrics.total("vllm:prefix_cache_hits_total") or 0,
        acceptance=_acceptance(metrics),
        inter_token_latency=metrics.histogram("vllm:inter_token_latency_seconds"),
    )


def _acceptance(metrics: ServerMetrics) -> AcceptanceCounters | None:
    rounds = metrics.total(f"{_SPECULATION}drafts_total")
    if rounds is None:  # vLLM has these counters only if it was started with a draft
        return None
    by_position = metrics.by_label(f"{_SPECULATION}accepted_tokens_per_pos_total", "position")
    positions = {
        int(position): count
        for position, count in by_position.items()
        if position.isdecimal() and len(position) < 5
    }
    length = min(max(positions, default=-1) + 1, _MOST_POSITIONS)
    return AcceptanceCounters(
        rounds=rounds,
        drafted=metrics.total(f"{_SPECULATION}draft_tokens_total") or 0,
        accepted=metrics.total(f"{_SPECULATION}accepted_tokens_total") or 0,
        accepted_per_position=tuple(positions.get(position, 0) for position in range(length)),
    )
