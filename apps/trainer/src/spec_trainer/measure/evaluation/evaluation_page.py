"""Write the page of ``evaluate --report``: the numbers of ``evaluate --json``, and plots of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_trainer.measure.evaluation.inputs import input_lines
from spec_trainer.measure.evaluation.sweep import sweep_lines
from spec_trainer.measure.evaluation.tables import benchmark_lines, break_even_sentence, load_lines
from spec_trainer.report.html import figures, text
from spec_trainer.report.page import origin, page, warnings
from spec_trainer.report.svg import svg

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from matplotlib.axes import Axes

    Document = Mapping[str, Any]

_SIDES = {"with_draft": "with the draft", "without_draft": "without"}


def evaluation_page(document: Document) -> str:
    """Return the page of a document of ``evaluate --json``."""
    versions = " ".join(f"{name} {version}" for name, version in document["engine_versions"].items())
    return page(
        "Evaluation of a draft",
        [
            "<h1>Evaluation of a draft</h1>",
            f"<p class=lead>{text(document['draft'])}<br>for {text(document['target'])}<br>"
            f"{text(document['engine'])} {text(versions)}, "
            f"draft tokens: {document['num_draft_tokens']}, temperature {document['temperature']:g}"
            f"<br>{text(origin(document))}</p>",
            _figures(document),
            warnings(document),
            lines_under("Text and images", input_lines(document)),
            lines_under("Benchmarks", benchmark_lines(document)),
            position_plot(document),
            load_plots(document),
            sweep_plot(document),
        ],
    )


def _figures(document: Document) -> str:
    shown = [
        ("acceptance length τ", document["acceptance_length"], "{:.2f}"),
        ("the same per request", document["acceptance_length_per_request"], "{:.2f}"),
        ("times as fast", document["speedup"], "{:.2f}"),
        ("tokens/s with the draft", document["tokens_per_s"], "{:,.0f}"),
        ("generated tokens", document["generated_tokens"], "{:,}"),
    ]
    equal = "yes" if document["outputs_equal"] else "no"
    return f"{figures(shown)}<p>Greedy output equal to plain greedy: {equal}.</p>"


def lines_under(title: str, lines: Iterable[str]) -> str:
    """Return lines as preformatted text under a heading; empty if there are none."""
    content = text("\n".join(lines))
    return f"<h2>{text(title)}</h2><pre>{content}</pre>" if content else ""


def position_plot(document: Document) -> str:
    """Return a plot of the share of guesses that were accepted, by draft position."""
    values = document["acceptance_per_position"]

    def draw(axes: Sequence[Axes]) -> None:
        axes[0].bar(range(1, len(values) + 1), values, width=0.7)
        axes[0].set(xlabel="draft position", ylabel="share accepted", ylim=(0, 1))

    return "<h2>Share of rounds that accept each position</h2>" + svg(draw, panels=1) if values else ""


def load_plots(document: Document) -> str:
    """Return plots of speed and latency by concurrency.

    A sentence says from which concurrency on decoding is slower with the draft.
    """
    entries = sorted(document["throughput"], key=lambda entry: entry["concurrency"])
    if not entries:
        return ""
    sides = [side for side in _SIDES if entries[0][side] is not None]
    parts: list[str] = []
    if len(sides) > 1:
        parts += [
            lines_under("Answers at once", load_lines(document)),
            f"<p>{break_even_sentence(document)}.</p>",
        ]
    parts.append(svg(lambda axes: _draw_speeds(axes, entries, sides), panels=2))
    if len(sides) > 1:
        parts.append(
            svg(lambda axes: _draw_speedup(axes, entries, document["break_even_concurrency"]), panels=1)
        )
    if entries[0]["with_draft"]["time_to_first_token_ms"] is not None:
        parts.append(svg(lambda axes: _draw_latencies(axes, entries, sides), panels=2))
    return "".join(parts)


def sweep_plot(document: Document) -> str:
    """Return a table and a plot of the speed-up by concurrency for each number of draft tokens; empty without."""
    if document["sweep"] is None:
        return ""
    loads = document["sweep"]["loads"]
    sizes = [load["concurrency"] for load in loads]

    def draw(axes: Sequence[Axes]) -> None:
        for rows in zip(*(load["numbers"] for load in loads), strict=True):
            speedups = [row["speedup"] for row in rows]
            axes[0].plot(sizes, speedups, "o-", ms=4, label=f"{rows[0]['num_draft_tokens']}")
        axes[0].axhline(1, color="black", lw=0.8)
        axes[0].set(title="speed-up by number of draft tokens", xlabel="answers at once", xscale="log")
        axes[0].legend(frameon=False)

    return lines_under("Draft tokens by load", sweep_lines(document)) + svg(draw, panels=1)


def _draw_speeds(axes: Sequence[Axes], entries: Sequence[Document], sides: Sequence[str]) -> None:
    sizes = [entry["concurrency"] for entry in entries]
    total, users = axes
    for side in sides:
        speeds = [entry[side]["tokens_per_s"] for entry in entries]
        each = [entry[side]["tokens_per_s_per_user"] for entry in entries]
        total.plot(sizes, speeds, "o-", ms=4, label=_SIDES[side])
        if None not in each:
            users.plot(each, speeds, "o-", ms=4, label=_SIDES[side])
    total.set(title="tokens/s in total", xlabel="answers at once", xscale="log")
    total.legend(frameon=False)
    users.set(title="tokens/s in total, per user", xlabel="tokens/s for each user")


def _draw_speedup(axes: Sequence[Axes], entries: Sequence[Document], border: float | None) -> None:
    sizes = [entry["concurrency"] for entry in entries]
    axes[0].plot(sizes, [entry["speedup"] for entry in entries], "o-", ms=4)
    axes[0].axhline(1, color="black", lw=0.8)
    if border is not None:
        axes[0].axvline(border, color="black", lw=0.8, ls="--")
    axes[0].set(title="speed-up by the draft", xlabel="answers at once", xscale="log")


def _draw_latencies(axes: Sequence[Axes], entries: Sequence[Document], sides: Sequence[str]) -> None:
    sizes = [entry["concurrency"] for entry in entries]
    titles = {
        "time_to_first_token_ms": "time to first token",
        "inter_token_latency_ms": "inter-token latency",
    }
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for side in sides:
            found = [entry[side][key] for entry in entries]
            (line,) = axis.plot(sizes, [one["mean"] for one in found], "o-", ms=4, label=_SIDES[side])
            halves, most = [one["p50"] for one in found], [one["p99"] for one in found]
            axis.fill_between(sizes, halves, most, alpha=0.15, color=line.get_color())
        axis.set(
            title=f"{title}, ms: mean, p50 to p99", xlabel="answers at once", xscale="log", ylim=(0, None)
        )
    axes[0].legend(frameon=False)
