"""Let a draft of fresh weights learn beside its server, which takes turns with servers that have no such draft.

The servers are on one GPU and have the same load, one after the other, again and again: the draft's server for four
windows, the server without a draft for one, and the server with prompt lookup for one. So a change of the machine's
speed reaches all of them. Only the draft's server stores requests, and its draft learns on another GPU.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from follow_figures import crossing, moment, records, series
from follow_servers import following, loaded, warm_up

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from follow_figures import Window
    from follow_servers import Follower, Servers

log = logging.getLogger("follow")

WINDOWS = {"live": 4, "no-draft": 1, "ngram": 1}
"""Windows of a server's turn. ``live`` is the server whose draft learns."""
LINES = ("no-draft", "ngram")
VERDICT = ("step", "requests", "acceptance_length", "acceptance_length_served", "served", "version")


def day_0(options: argparse.Namespace, servers: Servers, trainer: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the series of all servers so far, after each round of turns."""
    servers.start(*WINDOWS)
    urls = {name: servers.url(name) for name in WINDOWS}
    follower: Follower | None = None
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WINDOWS}
    requests = Counter[str]()
    origin_s, origin_clock = time.monotonic(), time.time()
    starts_s, run = 0.0, None
    with ExitStack() as stack:
        for number in itertools.count(1):
            for name, url in urls.items():
                watched_run = run if name == "live" else None
                rows, answered = turn(options, url, name, number, watched_run, origin_s)
                found[name] += [row | {"requests": requests[name] + row["requests"]} for row in rows]
                requests[name] += answered
                if follower is not None:
                    follower.check()
            log.info("round %d: %s", number, {name: brief(rows[-1]) for name, rows in found.items()})
            notes = follower.notes() if follower is not None else []
            yield {"day_0": summary(found, starts_s, verdicts(run, origin_clock), notes)}
            if follower is None and number >= options.rounds_before:
                starts_s = time.monotonic() - origin_s
                words, device = ["follow.replay=0"], options.trainer_device
                around = following(options, urls["live"], "day-0", device, words, trainer)
                follower = stack.enter_context(around)
                run = follower.run
            elif follower is not None and time.monotonic() > origin_s + starts_s + options.day_s:
                return


def turn(
    options: argparse.Namespace, url: str, name: str, number: int, run: Path | None, origin_s: float
) -> tuple[list[dict[str, Any]], int]:
    """Return the windows of one turn of a server, and the number of requests that it answered in all."""
    moments: list[Window] = []
    with loaded(options, url, f"{name}-{number}", everything=name == "live") as answers:
        warm_up(options, url)
        moments.append(moment(url, run))
        for count in range(1, WINDOWS[name] + 1):
            time.sleep(max(0.0, moments[0].begun_s + count * options.window_s - time.monotonic()))
            moments.append(moment(url, run))
    return series(answers, moments, origin_s), sum(answer["complete"] for answer in answers)


def summary(
    found: dict[str, list[dict[str, Any]]], starts_s: float, known: list[dict[str, Any]], notes: list[str]
) -> dict[str, Any]:
    """Return the series with what they show; ``starts_s`` is when ``follow`` began."""
    live = found["live"]
    learning = [row for row in live if row["begun_s"] >= starts_s]
    return {
        "series": found,
        "follow_starts_s": starts_s,
        "before": {
            name: mean([row for row in rows if row["at_s"] <= starts_s]) for name, rows in found.items()
        },
        "last": {name: mean(rows[-2 * WINDOWS[name] :]) for name, rows in found.items()},
        "crossed": {name: crossing(learning, found[name]) for name in LINES} if starts_s else {},
        "verdicts": known,
        "notes": notes,
    }


def mean(rows: list[dict[str, Any]]) -> float | None:
    """Return the mean tokens/s of some windows."""
    speeds = [row["output_tokens_per_s"] for row in rows]
    return sum(speeds) / len(speeds) if speeds else None


def verdicts(run: Path | None, origin_clock: float) -> list[dict[str, Any]]:
    """Return what ``follow`` has found at each verdict, and the seconds since the first turn."""
    rows = records(run, "versions.jsonl")
    return [{"at_s": row["time"] - origin_clock} | {name: row[name] for name in VERDICT} for row in rows]


def brief(row: dict[str, Any]) -> str:
    """Return the figures of a window in a few words."""
    tau = row["acceptance_length"]
    return f"{row['output_tokens_per_s']:.0f} tokens/s, tau {tau or 1:.2f}, {row['pushes']} pushes"
