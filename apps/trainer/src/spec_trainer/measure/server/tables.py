"""Format the lines that ``evaluate --server`` prints without ``--json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spec_trainer.measure.evaluation.tables import accuracy_sentence, break_even_sentence

_HEADS = ("tokens/s", "speed-up", "per user", "TTFT ms", "p50", "p99", "ITL ms", "p50", "p99")


def server_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that are printed for a document of ``evaluate --server``."""
    yield _server_line("server", document["server"], document["engine"], document["model"])
    if document["baseline_server"] is not None:
        yield _server_line(
            "baseline", document["baseline_server"], document["baseline_engine"], document["baseline_model"]
        )
    yield f"prompts: {document['prompts']:,}, tokens of the server: {document['generated_tokens']:,}"
    yield ""
    yield f"{'at once':<9}{'':<9}" + "".join(f"{head:>10}" for head in _HEADS)
    for entry in document["throughput"]:
        yield _load_line(entry, "server", entry["with_draft"], entry["speedup"])
        if entry["without_draft"] is not None:
            yield _load_line(entry, "baseline", entry["without_draft"], None)
    yield ""
    if document["baseline_server"] is not None:
        yield break_even_sentence(document)
    if document["outputs_equal"] is not None:
        yield _comparison(document)
    if document["accuracy"] is not None:
        yield accuracy_sentence("accuracy", document["accuracy"], document["accuracy_without_draft"])
    yield from (f"warning: {warning}" for warning in document["warnings"])
    yield f"acceptance length (tau): {_acceptance(document)}"


def _server_line(what: str, url: str, engine: str | None, model: str) -> str:
    return f"{what}: {url}, {engine or 'an unknown engine'}, model {model}"


def _load_line(entry: Mapping[str, Any], name: str, figures: Mapping[str, Any], speedup: float | None) -> str:
    user = figures["tokens_per_s_per_user"]
    cells = [
        f"{figures['tokens_per_s']:,.1f}",
        "" if speedup is None else f"{speedup:.2f}",
        "" if user is None else f"{user:,.1f}",
    ]
    for key in ("time_to_first_token_ms", "inter_token_latency_ms"):
        found = figures[key]
        cells += ["" if found is None else f"{found[statistic]:,.2f}" for statistic in ("mean", "p50", "p99")]
    return f"{entry['concurrency']:<9}{name:<9}" + "".join(f"{cell:>10}" for cell in cells)


def _comparison(document: Mapping[str, Any]) -> str:
    if document["outputs_equal"]:
        return "greedy texts of the two servers are equal"
    share = 100 * document["outputs_differing_share"]
    return f"{share:.0f} % of the greedy texts differ; docs/evaluation.md says when that is rounding"


def _acceptance(document: Mapping[str, Any]) -> str:
    if document["acceptance_length"] is None:
        return "not known; the server's /metrics has no usable counters of a draft"
    shares = " ".join(f"{share:.2f}" for share in document["acceptance_per_position"])
    by_position = f"; rounds that accept each position: {shares}" if shares else ""
    mean = document["acceptance_length_per_request"]
    per_request = "" if mean is None else f"; the mean of each answer's own: {mean:.2f}"
    return f"{document['acceptance_length']:.2f} tokens a pass, by the server's counters{by_position}{per_request}"
