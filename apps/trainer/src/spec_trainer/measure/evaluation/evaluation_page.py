"""Write the page of ``evaluate --report``: the numbers of ``evaluate --json``, and plots of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spec_trainer.measure.evaluation.inputs import input_lines
from spec_trainer.measure.evaluation.sweep import sweep_lines
from spec_trainer.measure.evaluation.tables import benchmark_lines, break_even_sentence, load_lines
from spec_trainer.report.html import figures, text
from spec_trainer.report.page import origin, page, warnings
from spec_trainer.report.svg import Plot, bars, curves, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]

_SIDES = {"with_draft": "with the draft", "without_draft": "without"}
_AT_ONCE = "answers at once"
_PER_USER = "tokens_per_s_per_user"


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
    shares = document["acceptance_per_position"]
    plots = svg([bars("share accepted", shares)])
    return f"<h2>Share of rounds that accept each position</h2>{plots}" if shares else ""


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
    speeds = {
        _SIDES[side]: [(one["concurrency"], one[side]["tokens_per_s"]) for one in entries] for side in sides
    }
    users = {
        _SIDES[side]: [
            (one[side][_PER_USER], one[side]["tokens_per_s"]) for one in entries if one[side][_PER_USER]
        ]
        for side in sides
    }
    total = curves("tokens/s in total", _AT_ONCE, speeds, xscale="log")
    parts.append(svg([total, curves("tokens/s in total, per user", "tokens/s for each user", users)]))
    if len(sides) > 1:
        parts.append(svg([_speedup(entries, document["break_even_concurrency"])]))
    if entries[0]["with_draft"]["time_to_first_token_ms"] is not None:
        titles = {
            "time_to_first_token_ms": "time to first token",
            "inter_token_latency_ms": "inter-token latency",
        }
        parts.append(svg([_latency(key, title, entries, sides) for key, title in titles.items()]))
    return "".join(parts)


def _speedup(entries: Sequence[Document], border: float | None) -> Plot:
    speedups = {"": [(one["concurrency"], one["speedup"]) for one in entries]}

    def draw(axes: Axes) -> None:
        if border is not None:
            axes.axvline(border, color="black", lw=0.8, ls="--")
        curves("speed-up by the draft", _AT_ONCE, speedups, level=1, xscale="log")(axes)

    return draw


def _latency(key: str, title: str, entries: Sequence[Document], sides: Sequence[str]) -> Plot:
    """Return a plot of a latency's mean, with a band from median to 99th percentile in the curve's colour."""
    sizes = [entry["concurrency"] for entry in entries]
    found = {_SIDES[side]: [entry[side][key] for entry in entries] for side in sides}
    means = {
        label: [(size, one["mean"]) for size, one in zip(sizes, own, strict=True)]
        for label, own in found.items()
    }

    def draw(axes: Axes) -> None:
        for own in found.values():
            axes.fill_between(sizes, [one["p50"] for one in own], [one["p99"] for one in own], alpha=0.15)
        title_of_all = f"{title}, ms: mean, p50 to p99"
        curves(title_of_all, _AT_ONCE, means, xscale="log", ylim=(0, None))(axes)

    return draw


def sweep_plot(document: Document) -> str:
    """Return a table and a plot of the speed-up by concurrency for each number of draft tokens; empty without."""
    if document["sweep"] is None:
        return ""
    speedups: dict[str, list[tuple[float, float]]] = {}
    for load in document["sweep"]["loads"]:
        for row in load["numbers"]:
            own = speedups.setdefault(str(row["num_draft_tokens"]), [])
            own.append((load["concurrency"], row["speedup"]))
    plot = curves("speed-up by number of draft tokens", _AT_ONCE, speedups, level=1, xscale="log")
    return lines_under("Draft tokens by load", sweep_lines(document)) + svg([plot])
