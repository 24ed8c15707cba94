"""Show progress on stderr: on a terminal as a bar, elsewhere as a line every ten seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spec_trainer.base.waiting import LINE_EVERY_S, Waiting

log = logging.getLogger(__name__)

_ENGINE_BOUND = 10
"""Percent of the time, spent waiting for features, from which the engine limits the run.

Features are kept ahead of training, so a trainer that is slower than its engine waits for none.
"""


class StepProgress(AbstractContextManager["StepProgress"]):
    """Shows the number of steps done, and a note that is made from the latest row of metrics."""

    def __init__(
        self,
        total_steps: int | None,
        title: str = "training",
        note: Callable[[Mapping[str, Any]], str] | None = None,
        unit: str = "step",
        begun: Callable[[Mapping[str, Any]], None] = lambda record: None,
        *,
        says_waits: bool = True,
    ) -> None:
        """Prepare the display.

        ``note`` formats a row of metrics; ``total_steps``: None if the end is unknown; ``unit``: the name of a step;
        ``begun`` is called with the row of the first step that is made; ``says_waits``: whether a line every ten
        seconds says what is waited for, which a command that may wait for days leaves out.
        """
        self._total = total_steps
        self._title = title
        self._unit = unit
        self._waiting = Waiting(f"{title}, first {unit}")
        self._shown = ExitStack()
        self._note = note or step_note
        self._begun = begun
        self._says_waits = says_waits
        self._last_line_s = 0.0
        self._first: tuple[int, float] | None = None
        console = Console(stderr=True)
        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        shows_bar = log.isEnabledFor(logging.INFO) and console.file.isatty()
        self._bar = Progress(*columns, console=console, disable=not shows_bar)
        self._task = self._bar.add_task("train", total=total_steps, note="")

    def show(self, record: Mapping[str, Any]) -> None:
        """Show the step number and the note of ``record``, a row of metrics."""
        note = self._note(record)
        self._bar.update(self._task, completed=record["step"], note=note)
        self._waiting.begin(f"{self._title}, {self._unit} {record['step'] + 1}{self._of_all}")
        now = time.monotonic()
        if self._first is None:
            self._first = (record["step"], now)
            self._begun(record)
        last = record["step"] == self._total
        if self._bar.disable and (last or now - self._last_line_s >= LINE_EVERY_S):
            self._last_line_s = now
            left = self._left(record["step"], now)
            log.info("%s %d%s %s%s", self._unit, record["step"], self._of_all, note, left)

    @property
    def _of_all(self) -> str:
        return "" if self._total is None else f"/{self._total}"

    def _left(self, step: int, now: float) -> str:
        """Return the expected time left, such as ``about 1.2 h left``.

        It is estimated from the mean step time since the first step shown.
        """
        first_step, first_s = self._first or (step, now)
        if self._total is None or step in (first_step, self._total):
            return ""
        seconds = (now - first_s) / (step - first_step) * (self._total - step)
        return f"  about {_duration(seconds)} left"

    def __enter__(self) -> Self:
        """Start the display."""
        self._bar.start()
        if self._bar.disable and self._says_waits:
            self._shown.enter_context(self._waiting)
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop the display."""
        self._shown.close()
        with suppress(OSError):  # the terminal may have been closed
            self._bar.stop()


def step_note(record: Mapping[str, Any]) -> str:
    """Format a row of metrics as ``loss 3.21  tau 1.84 (T 1: 1.43)  5,120 tok/s  waits 3 % for features (…)``.

    If a draft version is served, ``  serves v500`` follows, and the version's acceptance length if it is known.
    """
    busy, waiting = record["time_step_s"], record["time_data_s"]
    share = 100 * waiting / max(busy + waiting, 1e-9)
    side = "engine" if share >= _ENGINE_BOUND else "trainer"
    t1 = record.get("acceptance_length_t1")
    at_t1 = "" if t1 is None else f" (T 1: {t1:.2f})"
    served = f"  serves v{record['serving_version']}" if "serving_version" in record else ""
    if "serving_acceptance_length" in record:
        served += f" (tau {record['serving_acceptance_length']:.2f})"
    return (
        f"loss {record['loss']:.3f}  tau {record['acceptance_length']:.2f}{at_t1}  "
        f"{record['tokens_per_s']:,.0f} tok/s  waits {share:.0f} % for features ({side}-bound){served}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
