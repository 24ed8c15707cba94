"""RunDriver carries a run out. Plain, measured and decoding runs are written over it, once for every placement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from spec_trainer.decode.passes import Pass
    from spec_trainer.run.spec import RunSpec

    MeasureDraft = Callable[[int, Path], dict[str, Any]]
    """Given the number of steps and the folder of a draft, returns fields of a step's record."""


class RunDriver(ABC):
    """Trains parts of a run, and decodes with the draft that the run's engine serves."""

    @abstractmethod
    def train(
        self, part: RunSpec, notes: Mapping[str, Any] | None = None, measure: MeasureDraft | None = None
    ) -> float:
        """Train the steps of ``part`` that are left; return the seconds that engines have captured for.

        ``notes`` are fields of the record of every step of a cycle, and None for a whole run. ``measure`` gets each
        draft that is exported to be measured (``train.serve_every``). Raise Interrupted.
        """

    @abstractmethod
    def serve(self, version: int, folder: Path) -> None:
        """Serve the draft in ``folder``: the first one is loaded, later ones are pushed. Raise RunError."""

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> Pass:
        """Answer prompts as section ``decode`` says; raise Interrupted between two portions of them."""
