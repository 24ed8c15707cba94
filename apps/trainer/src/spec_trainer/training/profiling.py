"""Write torch.profiler traces of chosen steps into the run directory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path


class StepProfiler:
    """Writes ``profile-step-N.json`` (Chrome trace) for each step that ``profile.steps`` names."""

    def __init__(self, steps: Collection[int], folder: Path) -> None:
        """Prepare to profile the steps ``steps``, counted from 0, and to write traces into ``folder``."""
        self._steps = frozenset(steps)
        self._folder = folder

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace the ``with`` block if ``step`` was chosen."""
        if step not in self._steps:
            yield
            return
        from torch.profiler import profile

        with profile(record_shapes=True, profile_memory=True) as trace:
            yield
        trace.export_chrome_trace(str(self._folder / f"profile-step-{step}.json"))
