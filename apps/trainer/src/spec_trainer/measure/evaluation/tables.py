"""Format the lines that ``evaluate`` prints without ``--json``: tables, warnings, serving commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spec_trainer.measure.evaluation.inputs import input_lines
from spec_trainer.measure.evaluation.sweep import sweep_lines
from spec_trainer.run.serving import closing_lines


def evaluation_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that are printed for a document of ``evaluate``."""
    yield from setting_lines(document)
    yield f"prompts: {document['prompts']:,}, draft tokens: {document['num_draft_tokens']}"
    for lines in (_way_lines, input_lines, benchmark_lines, load_lines, sweep_lines):
        if table := list(lines(document)):
            yield from ("", *table)
    yield from ("", _comparison(document))
    yield from (f"warning: {warning}" for warning in document["warnings"])
    yield from closing_lines(document)


def setting_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that say what was measured, and with which engine."""
    versions = ", ".join(f"{name} {version}" for name, version in document["engine_versions"].items())
    engine = f"{document['engine']}{f' ({versions})' if versions else ''}"
    yield f"target: {document['target']}"
    yield f"draft: {document['draft']}"
    yield f"engine: {engine}, backend {document['backend']}"


def _way_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table with one row each for greedy answers, sampled answers and an untrained draft."""
    heads = ("tokens", "tau", "tau/request", "tokens/s", "without", "speed-up")
    yield (
        f"{'answers':<20}" + "".join(f"{head:>13}" for head in heads) + "  rounds that accept each position"
    )
    ways = {"greedy": document["greedy"], "sampled": document["sampled"]}
    for name, figures in ways.items():
        if figures is not None:
            yield _way_line(name, figures)
    if (before := document["acceptance_length_before"]) is not None:
        yield f"{'an untrained draft':<20}{'':>13}{before:>13.3f}"


def _way_line(name: str, figures: Mapping[str, Any]) -> str:
    label = name if name == "greedy" else f"sampled, T={figures['temperature']:g}"
    shares = " ".join(f"{share:.2f}" for share in figures["acceptance_per_position"])
    cells = (f"{figures['generated_tokens']:,}", *_lengths_and_speeds(figures))
    return f"{label:<20}" + "".join(f"{cell:>13}" for cell in cells) + f"  {shares}"


def _lengths_and_speeds(figures: Mapping[str, Any]) -> tuple[str, ...]:
    per_request = figures["acceptance_length_per_request"]
    return (
        f"{figures['acceptance_length']:.3f}",
        "" if per_request is None else f"{per_request:.3f}",
        f"{figures['tokens_per_s']:,.1f}",
        f"{figures['tokens_per_s_without_draft']:,.1f}",
        f"{figures['speedup']:.2f}",
    )


def _comparison(document: Mapping[str, Any]) -> str:
    """Return a sentence that says whether the greedy texts with the draft equal the texts without it."""
    if document["outputs_equal"]:
        return "greedy texts with the draft are equal to those without"
    share = f"{100 * document['outputs_differing_share']:.0f} % of the greedy texts differ"
    ties = {
        True: ", each first at a near tie of two tokens, which is rounding",
        False: ", not only at near ties: the engine or the draft is wrong",
        None: "; the engine does not say whether at near ties",
    }
    return share + ties[document["outputs_differing_only_at_ties"]]


def benchmark_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table with a row for each benchmark and for the total, then the accuracies.

    Yield nothing if there are no benchmarks.
    """
    rows = document["benchmarks"]
    if not rows:
        return
    heads = ("prompts", "tokens", "tau", "tau/request", "tokens/s", "without", "speed-up")
    yield f"{'benchmark':<12}" + "".join(f"{head:>13}" for head in heads)
    for name, row in (*rows.items(), ("total", document)):
        cells = (f"{row['prompts']:,}", f"{row['generated_tokens']:,}", *_lengths_and_speeds(row))
        yield f"{name:<12}" + "".join(f"{cell:>13}" for cell in cells)
    for name, row in rows.items():
        if row["accuracy"] is not None:
            yield accuracy_sentence(name, row["accuracy"], row["accuracy_without_draft"])


def accuracy_sentence(name: str, with_draft: float, without: float | None) -> str:
    """Return a sentence with the share of right answers, with the draft and without it."""
    comparison = "" if without is None else f", {100 * without:.1f} % without the draft"
    return f"{name}: {100 * with_draft:.1f} % of the answers are right{comparison}"


def load_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table with a row for each concurrency, and the sentence of ``break_even_sentence``."""
    entries = document["throughput"]
    if not entries:
        return
    heads = (
        "tokens/s",
        "without",
        "speed-up",
        "TTFT ms",
        "without",
        "ITL ms",
        "without",
        "per user",
        "without",
    )
    yield f"{'at once':<9}" + "".join(f"{head:>10}" for head in heads)
    for entry in entries:
        sides = (entry["with_draft"], entry["without_draft"])
        users = [side["tokens_per_s_per_user"] for side in sides]
        cells = [
            *(f"{side['tokens_per_s']:,.1f}" for side in sides),
            f"{entry['speedup']:.2f}",
            *(_mean(side["time_to_first_token_ms"]) for side in sides),
            *(_mean(side["inter_token_latency_ms"]) for side in sides),
            *("" if speed is None else f"{speed:,.1f}" for speed in users),
        ]
        yield f"{entry['concurrency']:<9}" + "".join(f"{cell:>10}" for cell in cells)
    yield break_even_sentence(document)


def break_even_sentence(document: Mapping[str, Any]) -> str:
    """Return a sentence with the concurrency from which on the draft makes decoding slower."""
    sizes = [entry["concurrency"] for entry in document["throughput"]]
    border = document["break_even_concurrency"]
    if border is None:
        return f"the draft pays at concurrency {max(sizes)}, the most that was measured"
    if border <= min(sizes):
        return f"the draft does not pay, even at concurrency {min(sizes)}"
    return f"the draft stops paying at a concurrency of about {border:.0f}"


def _mean(distribution: Mapping[str, float] | None) -> str:
    return "" if distribution is None else f"{distribution['mean']:,.2f}"
