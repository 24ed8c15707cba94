"""Compute the figures of ``follow_serving``: what clients have seen in a window, and when a line is crossed."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from push_gaps import gap_figures, gaps_of

from spec_core.records import ServerCounters
from spec_engine_sglang.server_counters import sglang_counters
from spec_engine_vllm.server_counters import vllm_counters

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

CROSSED = 3
"""Windows in a row that have to be above a line that is called crossed."""
ROOM = 1.2
"""Least latency budget over the server's own p99."""


@dataclass
class Window:
    """The counters of the server and the progress of the trainer at one moment."""

    begun_s: float
    counters: ServerCounters
    steps: dict[str, int]


def moment(url: str, run: Path | None) -> Window:
    """Return the counters of the server at ``url`` and of the run directory of ``follow``, now."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        text = page.read().decode()
    # SGLang counts requests that have ended, and shows no counter before the first one has.
    counters = vllm_counters(text) or sglang_counters(text) or ServerCounters(generated_tokens=0)
    return Window(time.monotonic(), counters, trained(run))


def trained(run: Path | None) -> dict[str, int]:
    """Return steps, tokens and samples that the run has trained so far, verdicts and pushes."""
    rows = list(records(run, "metrics.jsonl"))
    verdicts = list(records(run, "versions.jsonl"))
    return {
        "steps": len(rows),
        "tokens": sum(row.get("tokens", 0) for row in rows),
        "samples": sum(row.get("samples", 0) for row in rows),
        "verdicts": len(verdicts),
        "pushes": sum(row["served"] == row["step"] for row in verdicts),
    }


def records(run: Path | None, name: str) -> Iterable[dict[str, Any]]:
    """Yield the rows of a file of a run directory; one that is being written is left out."""
    file = None if run is None else run / name
    if file is not None and file.exists():
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


def figures(answers: Sequence[dict[str, Any]], begun: Window, ended: Window) -> dict[str, Any]:
    """Return what clients and server have counted between two moments."""
    first, last = begun.begun_s, ended.begun_s
    elapsed, since = last - first, ended.counters - begun.counters
    whole = [answer for answer in answers if answer["complete"] and first <= answer["times_s"][-1] < last]
    asked = [answer for answer in answers if answer["times_s"] and first <= answer["begun_s"] < last]
    quantile = since.latency_quantile(0.99)
    trained = {name: count - begun.steps[name] for name, count in ended.steps.items()}
    return {
        "seconds": elapsed,
        "output_tokens_per_s": tokens_between(answers, first, last) / elapsed,
        "requests": len(whole),
        "inter_token_ms": gap_figures([gap for answer in whole for gap in token_times(answer)]),
        "message_gap_ms": gap_figures(gaps_of(answers, first, last)),
        "first_token_ms": gap_figures([answer["times_s"][0] - answer["begun_s"] for answer in asked]),
        "failed_requests": sum(
            (answer["status"] not in (0, 200)) or (answer["status"] == 200 and not answer["complete"])
            for answer in answers
        ),
        "versions_in_answers": sorted({int(answer["draft_version"] or 0) for answer in whole}),
        "server": {
            "output_tokens_per_s": since.generated_tokens / elapsed,
            "acceptance_length": since.acceptance and since.acceptance.acceptance_length,
            "cached_prompt_tokens": since.cached_tokens,
            "inter_token_p99_ms": None if quantile is None else 1e3 * quantile,
            "bound_ms": None if quantile is None else bound_ms(since, quantile),
        },
        "trainer": {**trained, "tokens_per_s": trained["tokens"] / elapsed},
    }


def bound_ms(counters: ServerCounters, p99_s: float) -> float | None:
    """Return the first bound of a histogram of latencies that leaves room above a p99; None if there is none."""
    bounds = [bound for bound, _ in counters.inter_token_latency if ROOM * p99_s <= bound < math.inf]
    return 1e3 * bounds[0] if bounds else None


def token_times(answer: dict[str, Any]) -> list[float]:
    """Return seconds per token: the time from message to message over the tokens of the later."""
    times, tokens = answer["times_s"], answer["tokens"]
    return [
        (later - earlier) / number
        for earlier, later, number in zip(times, times[1:], tokens[1:], strict=False)
        for _ in range(number)
    ]


def tokens_between(answers: Sequence[dict[str, Any]], begun_s: float, ended_s: float) -> int:
    """Return the tokens that came in that time."""
    return sum(
        number
        for answer in answers
        for at, number in zip(answer["times_s"], answer["tokens"], strict=True)
        if begun_s <= at < ended_s
    )


def series(
    answers: Sequence[dict[str, Any]], moments: Sequence[Window], origin_s: float
) -> list[dict[str, Any]]:
    """Return throughput, acceptance and training from each moment to the next, over seconds since ``origin_s``."""
    rows = []
    ends = [answer["times_s"][-1] for answer in answers if answer["complete"] and answer["times_s"]]
    for begun, ended in itertools.pairwise(moments):
        since, elapsed = ended.counters - begun.counters, ended.begun_s - begun.begun_s
        rows.append(
            {
                "begun_s": begun.begun_s - origin_s,
                "at_s": ended.begun_s - origin_s,
                "output_tokens_per_s": tokens_between(answers, begun.begun_s, ended.begun_s) / elapsed,
                "requests": sum(end < ended.begun_s for end in ends),
                "acceptance_length": since.acceptance and since.acceptance.acceptance_length,
                "trained_tokens_per_s": (ended.steps["tokens"] - begun.steps["tokens"]) / elapsed,
                **{name: ended.steps[name] for name in ("steps", "verdicts", "pushes")},
            }
        )
    return rows


def crossing(rows: Sequence[dict[str, Any]], line: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first of several windows in a row that are above another server's; None if there are none.

    A window has to be above the last window of the ``line`` before it, and above the first after it.
    """
    levels = [_level(row, line) for row in rows]
    above = [
        level is not None and row["output_tokens_per_s"] > level
        for row, level in zip(rows, levels, strict=True)
    ]
    for number in range(len(rows) - CROSSED + 1):
        if all(above[number : number + CROSSED]):
            names = ("at_s", "requests", "output_tokens_per_s", "acceptance_length", "steps", "pushes")
            return {name: rows[number][name] for name in names} | {"line_tokens_per_s": levels[number]}
    return None


def _level(row: dict[str, Any], line: Sequence[dict[str, Any]]) -> float | None:
    before = [other["output_tokens_per_s"] for other in line if other["at_s"] <= row["begun_s"]]
    after = [other["output_tokens_per_s"] for other in line if other["begun_s"] >= row["at_s"]]
    return max([*before[-1:], *after[:1]], default=None)


def device_memory() -> list[dict[str, int]]:
    """Return used memory in MiB and utilization of each GPU, as its driver reports them; nothing without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(",") for line in done.stdout.strip().splitlines()]
    return [{"used_mib": _number(used), "utilization": _number(utilization)} for used, utilization in rows]


def _number(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0
