"""Write the sections of a report about speculative decoding, for readers who do not know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_trainer.report.html import number_table, text
from spec_trainer.report.svg import curves, svg

DECODING_STYLE = """
.text { white-space: break-spaces; overflow-wrap: anywhere; font: 13px/1.7 ui-monospace, monospace;
  background: var(--box); border-radius: 10px; padding: .8rem 1rem; margin: .6rem 0 }
.text i { font-style: normal; color: var(--soft) } .text b, .key b { font-weight: inherit; border-radius: 3px }
.text s, .key s { color: var(--refused); font-size: 85% } dt { font-weight: 600 } dd { margin: 0 0 .5rem }
.g1 { background: #d6ecff } .g2 { background: #aed8ff } .g3 { background: #86c3ff } .g4 { background: #5aabf5 }
.g1, .g2, .g3, .g4 { color: #1c2430 }
.g5 { background: #2b74b8; color: #fff }
"""
_LAST_SHADE = 5

_NUMBERS = {
    "acceptance_length": (
        "Acceptance length τ of the trained draft",
        "The target checks several guesses in one pass; this is how many tokens a pass yields on average: the "
        "guesses that it agrees with, and one of its own.",
    ),
    "acceptance_length_before": (
        "Of an untrained draft",
        "The same with a draft that has learnt nothing: near 1, which is what decoding without guesses yields.",
    ),
    "acceptance_length_bigram": (
        "Of a bigram draft",
        "Each token guessed from the one before it, by counted pairs of the training text: a draft that reads the "
        "target's hidden states has to beat this.",
    ),
    "acceptance_length_prompt_lookup": (
        "Of prompt lookup",
        "Guesses copied from where the last words stood before in the same text: free, and good at repetitions only.",
    ),
    "outputs_equal": (
        "Greedy output equal to plain decoding",
        "Whether the most likely text is the same with the draft and without, token by token: guesses change the "
        "speed and never the text.",
    ),
}


def explanations(summary: Mapping[str, Any]) -> str:
    """Return HTML that explains the figures of speculative decoding to readers who do not know it.

    Return an empty string if one of the figures was not measured.
    """
    if any(summary.get(key) is None for key in _NUMBERS):
        return ""
    rows = "".join(
        f"<dt>{title}: {text(_shown(summary[key]))}<dd>{sentence}"
        for key, (title, sentence) in _NUMBERS.items()
    )
    return f"<h2>What the numbers say</h2><dl>{rows}</dl>"


def _shown(value: bool | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}"


def speed_picture(summary: Mapping[str, Any]) -> str:
    """Return a plot of the speed-up over plain decoding, by number of draft tokens."""
    rows = summary.get("speeds")
    if not rows:
        return ""
    speedups: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        own = speedups.setdefault(f"{row['concurrency']} at once", [])
        own.append((row["num_draft_tokens"], row["speedup"]))
    plot = curves("speed-up", "draft tokens per pass", speedups, level=1, ylim=(0, None))
    shown = [
        {**row, "without": row["tokens_per_s"] / row["speedup"]}
        for row in rows
        if row["num_draft_tokens"] == summary["num_draft_tokens"]
    ]
    columns = {
        "texts at once": ("concurrency", "{}"),
        f"tokens/s, {summary['num_draft_tokens']} guessed a pass": ("tokens_per_s", "{:,.0f}"),
        "without": ("without", "{:,.0f}"),
        "speed-up": ("speedup", "{:.2f} ×"),
    }
    return (
        "<h2>Speed by number of draft tokens</h2><p>Against decoding without a draft, by the same code and with "
        "as many texts at once. A pass over few tokens leaves the hardware idle, and guesses are nearly free; with "
        "many texts at once it is busy, and every refused guess costs time.</p>"
        f"{svg([plot])}<div class=wide>{number_table(shown, columns)}</div>"
    )


def texts(summary: Mapping[str, Any]) -> str:
    """Return decoded texts, with accepted guesses coloured by position and refused guesses struck out."""
    shown = summary.get("texts")
    if not shown:
        return ""
    places = range(1, summary["num_draft_tokens"] + 1)
    key = " ".join(f"<b class=g{min(place, _LAST_SHADE)}>&nbsp;guess {place}&nbsp;</b>" for place in places)
    parts = "".join(
        f"<div class=text><i>{text(one['prompt'])}</i>{''.join(map(_token, one['tokens']))}</div>"
        for one in shown
    )
    return (
        "<h2>What was guessed, and what was refused</h2>"
        f"<p class=key>The prompt is grey. Accepted: {key}; the darker, the later in its pass. <s>Struck out</s>: a "
        "guess that the target refused, before the token that it put there. Uncoloured: the target's own token.</p>"
        f"{parts}"
    )


def _token(token: Mapping[str, Any]) -> str:
    refused = ""
    if token["refused"] is not None:  # a rejected line break is shown, not made
        refused = f"<s>{text(token['refused'].replace(chr(10), '↵'))}</s>"
    word = text(token["text"])
    if token["place"]:
        return f"{refused}<b class=g{min(token['place'], _LAST_SHADE)}>{word}</b>"
    return refused + word


def topics(summary: Mapping[str, Any]) -> str:
    """Return a table of the acceptance length by kind of text."""
    rows = [{"topic": topic, **row} for topic, row in summary.get("topics", {}).items()]
    columns = {
        "the prompt begins": ("topic", "{}"),
        "acceptance length τ": ("acceptance_length", "{:.2f}"),
        "passes of the target": ("rounds", "{:,}"),
    }
    return f"<h2>Acceptance by topic</h2>{number_table(rows, columns, words=1)}" if rows else ""
