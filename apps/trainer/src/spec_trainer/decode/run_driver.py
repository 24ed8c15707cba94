"""RunDriver: the interface by which a run trains and decodes, in one process or with worker processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from spec_trainer.decode.passes import Pass
    from spec_trainer.run.spec import RunSpec

    MeasureDraft = Callable[[int, Path], dict[str, Any]]
    """Measures a draft, given its number of steps and its folder; returns fields for a step's record."""


class RunDriver(ABC):
    """Trains a run or one of its cycles, and decodes with the draft that the run's engine serves."""

    @abstractmethod
    def train(
        self, part: RunSpec, notes: Mapping[str, Any] | None = None, measure: MeasureDraft | None = None
    ) -> float:
        """Train the remaining steps of ``part``, the run or one cycle; return the engines' seconds of capture.

        ``notes``: fields added to every row of metrics of a cycle; None if the run has no cycles. ``measure`` is
        called with each draft that is exported for a measurement (``train.serve_every``). Raise Interrupted if a stop
        is requested.
        """

    @abstractmethod
    def serve(self, version: int, folder: Path) -> None:
        """Serve the draft in ``folder``: the first draft is loaded, later drafts are pushed. Raise RunError."""

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> Pass:
        """Answer prompts with the settings of section ``decode``; raise Interrupted between two portions."""
