"""Write ``report.html``, a self-contained page with inline SVG, without scripts or network access."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

import yaml

from spec_trainer.base.disk import write_atomically
from spec_trainer.report.decoding import DECODING_STYLE, explanations, speed_picture, texts, topics
from spec_trainer.report.html import figures, number_table, table, text
from spec_trainer.report.svg import Points, bars, curves, svg
from spec_trainer.report.updates import judged_drafts, pushes
from spec_trainer.run.metrics import read_metrics
from spec_trainer.run.records import MeasurementRow, ReplacementRow, VersionRow, read_records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_trainer.run.directory import RunDirectory

Record = dict[str, Any]

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5b6675; --box: #f3f6fa; --line: #e4e9f0; --page: #fff;
  --refused: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --text: #dde3ec; --soft: #9aa6b6; --box: #1e2631; --line: #323c4a; --page: #12171e;
    --refused: #ff8f84 }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; color: var(--text); background: var(--page) }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.lead { color: var(--soft); overflow-wrap: anywhere; margin-top: .2rem }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.2rem 0 }
.figure { background: var(--box); border-radius: 10px; padding: .7rem 1.1rem; min-width: 8rem }
.figure b { display: block; font-size: 1.5rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top }
th { font-weight: 600 } td.n { text-align: right; font-variant-numeric: tabular-nums }
tr + tr td { border-top: 1px solid var(--line) }
.wide { overflow-x: auto } .panels { display: flex; flex-wrap: wrap; gap: 1rem }
svg { max-width: 100%; height: auto; background: #fff; border-radius: 10px }
.warnings { border-left: 4px solid #d97706; padding: .2rem 1rem; margin: 1rem 0; background: var(--box) }
pre { background: var(--box); padding: 1rem; border-radius: 10px; overflow: auto } summary { cursor: pointer }
"""

_EVALUATION_ROWS = {
    "acceptance_length": "trained draft",
    "acceptance_length_before": "untrained draft",
    "acceptance_length_bigram": "bigram draft",
    "acceptance_length_prompt_lookup": "prompt lookup",
}


def write_report(directory: RunDirectory, title: str, summary: Mapping[str, Any]) -> None:
    """Render metrics.jsonl, the summary and the configuration of a run as ``report.html``."""
    write_atomically(directory.report, report_page(directory, title, summary))


def report_page(directory: RunDirectory, title: str, summary: Mapping[str, Any]) -> str:
    """Return the page of ``write_report``."""
    records = read_metrics(directory.metrics)
    parts = [
        f"<h1>{text(title)}</h1>",
        f"<p class=lead>{text(summary.get('description', ''))}<br>{text(origin(summary))}</p>",
        _figures(summary),
        warnings(summary),
        _serving(summary),
        _decoding(summary),
        explanations(summary),
        speed_picture(summary),
        texts(summary),
        _positions(records, summary),
        topics(summary),
        _curves(records),
        pushes(records, summary),
        _measurements(read_records(directory.measurements, MeasurementRow), records),
        judged_drafts(read_records(directory.versions, VersionRow)),
        _cycles(summary),
        _replacements(read_records(directory.replacements, ReplacementRow)),
        _pace(records),
        _memory(records),
        _time(summary),
        _configuration(directory, summary),
    ]
    return page(title, parts)


def page(title: str, parts: Sequence[str]) -> str:
    """Return a complete HTML page in the style of reports; ``parts``: HTML of the body."""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8>"
        f'<meta name=viewport content="width=device-width, initial-scale=1"><title>{text(title)}</title>'
        f"<style>{_STYLE}{DECODING_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def warnings(summary: Mapping[str, Any]) -> str:
    """Return HTML with the reasons why figures are not valid; empty if there are none."""
    listed = "".join(f"<li>{text(warning)}" for warning in summary.get("warnings", ()))
    return f"<div class=warnings><b>Warnings</b><ul>{listed}</ul></div>" if listed else ""


def _figures(summary: Mapping[str, Any]) -> str:
    shown = [
        ("times as fast with the draft", summary.get("speedup"), "{:.2f}"),
        ("acceptance length τ", summary.get("acceptance_length"), "{:.2f}"),
        ("τ in rounds, held out", summary.get("eval_acceptance_length_rounds"), "{:.2f}"),
        ("simulated τ, held out", summary.get("eval_acceptance_length"), "{:.2f}"),
        ("simulated τ at T 1, held out", summary.get("eval_acceptance_length_t1"), "{:.2f}"),
        ("final loss", summary.get("loss"), "{:.3f}"),
        ("optimizer steps", summary.get("steps"), "{:,}"),
        ("tokens trained", summary.get("tokens"), "{:,}"),
        ("wall time", summary.get("wall_s"), "{:,.0f} s"),
    ]
    return figures(shown)


def origin(summary: Mapping[str, Any]) -> str:
    """Return date, library versions, machine and the run's seed, in one line."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("spec-trainer", "torch"))
    device = f"{summary['device']}; " if "device" in summary else ""
    machine = f"{device}{platform.machine()}, {os.cpu_count()} cores"
    seed = f"; seed {summary['seed']}" if "seed" in summary else ""
    return f"{datetime.now():%Y-%m-%d %H:%M}; {versions}, Python {platform.python_version()}; {machine}{seed}"


def _configuration(directory: RunDirectory, summary: Mapping[str, Any]) -> str:
    """Return HTML with the keys that differ from their defaults, and all keys in a collapsed section."""
    sections = {name: value for name, value in summary.get("changed", {}).items() if value != {}}
    changed = yaml.safe_dump(sections, sort_keys=False) if sections else ""
    shown = (
        f"<h2>Configuration</h2><p>Plugins, and what differs from the defaults:</p><pre>{text(changed)}</pre>"
        if changed
        else ""
    )
    every = text(directory.config.read_text(encoding="utf-8"))
    return f"{shown}<details><summary>All keys of the configuration</summary><pre>{every}</pre></details>"


def _serving(summary: Mapping[str, Any]) -> str:
    """Return HTML with the serving command of each engine that can serve the draft."""
    commands = "".join(
        f"<p>With {text(engine)}:</p><pre>{text(command)}</pre>"
        for engine, command in summary.get("serve", {}).items()
    )
    return f"<h2>Serve the draft</h2>{commands}" if commands else ""


def _decoding(summary: Mapping[str, Any]) -> str:
    """Return HTML with measured acceptance lengths of the draft and the baselines, and tokens per second."""
    rows = [
        (label, f"{summary[key]:.2f}")
        for key, label in _EVALUATION_ROWS.items()
        if summary.get(key) is not None
    ]
    if not rows:
        return ""
    lengths = table(("draft", "acceptance length τ"), rows, words=1)
    return f"<h2>Speculative decoding on held-out prompts</h2>{lengths}{_speed(summary)}"


def _speed(summary: Mapping[str, Any]) -> str:
    """Return a table of tokens per second with and without the draft, in total and by concurrency."""
    if not summary.get("tokens_per_s_without_draft"):
        return ""
    rows = [{"concurrency": "as many as the engine takes", **summary}, *summary.get("throughput", ())]
    shown = [{**row, "speedup": row["tokens_per_s"] / row["tokens_per_s_without_draft"]} for row in rows]
    columns = {
        "at once": ("concurrency", "{}"),
        "tokens/s with the draft": ("tokens_per_s", "{:,.0f}"),
        "without": ("tokens_per_s_without_draft", "{:,.0f}"),
        "speed-up": ("speedup", "{:.2f} ×"),
    }
    speeds = number_table(shown, columns, words=1)
    return (
        f"{speeds}<p>Greedy output equal to plain greedy: {'yes' if summary['outputs_equal'] else 'no'}.</p>"
    )


def _curves(records: Sequence[Record]) -> str:
    if not records:
        return ""
    titles = {
        "loss": "loss",
        "acceptance_length": "acceptance length (simulated)",
        "lr": "learning rate",
    }
    kinds = {"training": "{}", "held out": "eval_{}", "training, at T 1": "{}_t1"}
    lines = {"training": "-", "training, at T 1": "--"}
    plots = [
        curves(
            title, "step", {kind: _points(records, form.format(key)) for kind, form in kinds.items()}, lines
        )
        for key, title in titles.items()
    ]
    return "<h2>Training</h2>" + svg(plots)


def _points(records: Sequence[Record], key: str, scale: float = 1) -> list[tuple[float, float]]:
    return [(record["step"], record[key] / scale) for record in records if key in record]


def _pace(records: Sequence[Record]) -> str:
    """Return plots of tokens per second and of the share of time spent waiting for features, over steps."""
    timed = [record for record in records if "tokens_per_s" in record and "time_step_s" in record]
    if not timed:
        return ""
    shares = [
        (one["step"], 100 * one["time_data_s"] / (one["time_data_s"] + one["time_step_s"] or 1))
        for one in timed
    ]
    shown = {"tokens/s": _points(timed, "tokens_per_s"), "waits for features, % of a step": shares}
    return "<h2>Pace</h2>" + _from_zero(shown)


def _memory(records: Sequence[Record]) -> str:
    """Return a plot of the host memory and the device memory of trainer rank 0 at each step."""
    shown = {
        "host memory, GiB": _points(records, "memory_host_bytes", 2**30),
        "device memory, peak so far, GiB": _points(records, "memory_device_bytes", 2**30),
    }
    if not any(shown.values()):
        return ""
    return "<h2>Memory of the first trainer</h2>" + _from_zero(shown)


def _from_zero(shown: Mapping[str, Points]) -> str:
    """Return a plot over steps, whose axis begins at 0, for each title in ``shown`` that has points."""
    return svg(
        [
            curves(title, "step", {"": points}, {"": "-"}, ylim=(0, None))
            for title, points in shown.items()
            if points
        ]
    )


def _positions(records: Sequence[Record], summary: Mapping[str, Any]) -> str:
    shown = []
    if records:
        shown.append(bars("agreement after right guesses, last step", records[-1].get("accuracy", [])))
    if summary.get("acceptance_per_position"):
        shown.append(bars("share of rounds that accept the position", summary["acceptance_per_position"]))
    return "<h2>Guesses by position</h2>" + svg(shown) if shown else ""


def _measurements(measured: Sequence[Record], records: Sequence[Record]) -> str:
    """Return HTML with the figures that the engine measured with drafts, and how long training waited."""
    if not measured:
        return ""
    columns = {
        "step": ("step", "{:,}"),
        "τ": ("serving_acceptance_length", "{:.2f}"),
        "τ, mean of the answers": ("serving_acceptance_length_per_request", "{:.2f}"),
        "tokens/s of an engine": ("serving_tokens_per_s", "{:,.0f}"),
        "tokens": ("serving_tokens", "{:,}"),
        "seconds": ("serving_s", "{:.1f} s"),
    }
    waited = sum(record.get("serve_wait_s", 0.0) for record in records)
    lengths = {"": _points(measured, "serving_acceptance_length")}
    return (
        "<h2>The draft in the run's engine</h2>"
        + svg([curves("acceptance length in the engine", "step", lengths)])
        + number_table(measured, columns)
        + f"<p>Training waited {waited:.1f} s for it.</p>"
    )


def _cycles(summary: Mapping[str, Any]) -> str:
    """Return a table with the figures of each draft that the run's engine has served."""
    cycles = summary.get("cycles", ())
    if not cycles:
        return ""
    columns = {
        "draft version": ("draft_version", "{}"),
        "τ, held out": ("held_out_acceptance_length", "{:.2f}"),
        "τ, trained on": ("decode_acceptance_length", "{:.2f}"),
        "tokens": ("decode_tokens", "{:,}"),
        "seconds": ("decode_s", "{:.1f} s"),
        "second prefill": ("prefill_s", "{:.1f} s"),
    }
    return f"<h2>Decoding by the run's engine</h2>{number_table(cycles, columns)}"


def _replacements(entries: Sequence[Record]) -> str:
    """Return a table of replaced engines, with time and cause."""
    if not entries:
        return ""
    rows = [{**entry, "time": datetime.fromtimestamp(entry["time"])} for entry in entries]
    columns = {
        "engine": ("worker", "{}"),
        "after step": ("step", "{}"),
        "at": ("time", "{:%Y-%m-%d %H:%M:%S}"),
        "cause": ("cause", "{}"),
    }
    return f"<h2>Engines that were replaced</h2>{number_table(rows, columns, words=4)}"


def _time(summary: Mapping[str, Any]) -> str:
    times = summary.get("time_s")
    if not times:
        return ""
    total = sum(times.values()) or 1.0
    rows = [(name, f"{value:.1f} s", f"{100 * value / total:.0f} %") for name, value in times.items()]
    return f"<h2>Where the time went</h2>{table((), rows, words=1)}"
