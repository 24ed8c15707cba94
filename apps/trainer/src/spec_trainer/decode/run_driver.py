"""RunDriver: the interface by which a run trains and decodes, in one process or with worker processes."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from spec_trainer.decode.passes import Pass
    from spec_trainer.run.spec import RunSpec
    from spec_trainer.training.wiring import Consume, RankLinks

    MeasureDraft = Callable[[int, Path], dict[str, Any]]
    """Measures a draft, given its number of steps and its folder; returns fields for a step's record."""
    Sleep = Callable[[float], object]
    """Waits for a number of seconds."""
    Pause = Callable[[Callable[[], bool], Sleep], object]
    """Called after a step; returns when the next step may begin, or when the first argument returns True. It waits by
    the second argument alone."""


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """A function that consumes a part's features in the trainer rank, in whichever process the rank is."""

    entry: str
    """The function as ``package.module:name``. It is called as a ``Consume`` with ``arguments`` added, and puts its
    result into ``RankLinks.result``."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further argument of the function; JSON-serializable."""

    @property
    def consume(self) -> Consume:
        """The function, with its arguments, as a ``Consume``."""
        function = pkgutil.resolve_name(self.entry)

        def consuming(part: RunSpec, rank: int, device: torch.device, links: RankLinks) -> object:
            return function(part, rank, device, links, self.arguments)

        return consuming


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
    def perform(
        self,
        task: RankTask,
        part: RunSpec,
        notes: Mapping[str, Any] | None = None,
        pause: Pause | None = None,
    ) -> dict[str, Any]:
        """Run ``task`` on the samples of ``part``, which are in memory only, and return its result.

        Only for a run with one trainer rank that follows live requests. ``notes``: as for ``train``. ``pause`` is
        called after each step. Raise Interrupted if a stop is requested.
        """

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait while the run has nothing to do, at most ``seconds``. Raise as ``train`` does."""

    @abstractmethod
    def serve(self, version: int, folder: Path) -> None:
        """Serve the draft in ``folder``: the first draft is loaded, later drafts are pushed. Raise RunError."""

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> Pass:
        """Answer prompts with the settings of section ``decode``; raise Interrupted between two portions."""
