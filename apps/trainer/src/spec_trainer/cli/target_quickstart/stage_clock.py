"""Charge the time of each stage to its round, also that of a stage that is killed or stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from spec_core.errors import RunError
from spec_trainer.cli.target_quickstart.folder import Round

_EVERY_S = 0.25
"""Seconds between two notes of the time so far: the most that a killed stage takes uncharged."""


@contextmanager
def charged(one: Round, stage: str) -> Generator[None]:
    """Charge the time of the ``with`` block to ``stage``; if the block does not end, to interrupted stages."""
    start = time.monotonic()
    over = threading.Event()

    def note_until_over() -> None:
        while not over.wait(_EVERY_S):
            with suppress(RunError):  # the disk is full, which the stage itself will say
                one.note_under_way(time.monotonic() - start)

    notes = threading.Thread(target=note_until_over, name="stage clock", daemon=True)
    notes.start()
    has_ended = False
    try:
        yield
        one.end_stage(stage, time.monotonic() - start)
        has_ended = True
    finally:
        over.set()
        notes.join()
        with suppress(RunError):
            one.note_under_way(0.0 if has_ended else time.monotonic() - start)
