"""Read the counters of a running SGLang server from its metrics.

The server is SGLang 0.5.23 with ``--enable-metrics``.
"""

from __future__ import annotations

from spec_core.records import AcceptanceCounters, ServerCounters
from spec_kit.live_traffic import ServerMetrics


def sglang_counters(text: str) -> ServerCounters | None:
    """Return the counters of finished requests from an SGLang server's metrics.

    The result is None for the metrics of another program.
    """
    metrics = ServerMetrics(text)
    generated = metrics.total("sglang:generation_tokens_total")
    if generated is None:
        return None
    return ServerCounters(
        generated_tokens=generated,
        cached_tokens=metrics.total("sglang:cached_tokens_total") or 0,
        acceptance=_acceptance(metrics, generated),
        inter_token_latency=metrics.histogram("sglang:inter_token_latency_seconds"),
    )


def _acceptance(metrics: ServerMetrics, generated: int) -> AcceptanceCounters | None:
    """Return the numbers of rounds and of accepted tokens, generated − answers − rounds; None without a draft.

    SGLang counts neither accepted nor drafted tokens. The prefill yields each answer's first token, and each
    round yields one token of the target itself; all other generated tokens are accepted guesses.
    """
    rounds, answers = (
        metrics.total(f"sglang:{name}_total") for name in ("spec_verify_calls", "num_requests")
    )
    if not rounds or answers is None:
        return None
    return AcceptanceCounters(rounds=rounds, accepted=max(0, generated - answers - rounds))
