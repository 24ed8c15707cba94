"""Have an engine generate while a test does something else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spec_testing.limits import patient

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from spec_core import Engine
    from spec_core.records import SamplingParams

LIMIT_S = patient(120.0)
"""Longest time, in seconds, that the last answers may take."""


@contextmanager
def generating(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> Generator[list[list[tuple[int, ...]]]]:
    """Generate in a thread during the block, and raise the thread's error.

    Yield a list to which each call of ``Engine.generate`` adds the token ids of its answers.
    """
    answers: list[list[tuple[int, ...]]] = []
    enough = threading.Event()

    def generate() -> None:
        while not enough.is_set():
            answers.append([answer.token_ids for answer in engine.generate(prompts, sampling)])

    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(generate)
        try:
            yield answers
        finally:
            enough.set()
        generating.result(LIMIT_S)
