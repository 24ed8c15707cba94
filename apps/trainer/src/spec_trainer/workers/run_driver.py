"""RunDriver is the interface by which a run trains and decodes, in one process or with workers."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from spec_trainer.run.spec import RunSpec
    from spec_trainer.training.wiring import Consume, RankLinks
    from spec_trainer.workers.passes import Pass

MeasureDraft = Callable[[int, Path], dict[str, Any]]
"""Measures a draft, given its number of steps and its folder; returns fields for a step's record."""
Sleep = Callable[[float], object]
"""Waits for a number of seconds."""
Pause = Callable[[Callable[[], bool], Sleep], object]
"""Called after a step; waits until the next step may begin, or until the first argument returns True. It must
wait only by calling the second argument."""


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """A function that the trainer rank, in whatever process, calls with the features of some samples."""

    entry: str
    """The function as ``package.module:name``. Its arguments are the arguments of a ``Consume`` function
    (``training.wiring``) and ``arguments``. It puts its result into ``RankLinks.result``."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Last argument of the function; JSON-serializable."""

    @property
    def consume(self) -> Consume:
        """The function with ``arguments`` bound, as a ``Consume`` of ``training.wiring``."""
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
        """Train the remaining steps of ``part``, the run or one cycle.

        Return the seconds that engines spent on captures. ``notes``: fields added to every row of metrics of
        a cycle; None if the run has no cycles. ``measure`` is called with each draft that is exported for a
        measurement (``train.serve_every``). Raise Interrupted if a stop is requested.
        """

    @abstractmethod
    def perform(
        self,
        task: RankTask,
        part: RunSpec,
        notes: Mapping[str, Any] | None = None,
        pause: Pause | None = None,
    ) -> dict[str, Any]:
        """Run ``task`` on the samples of the RunSpec ``part``, and return the task's result.

        The samples are in memory only. The run must have one trainer rank and follow live requests.
        ``notes``: fields added to every row of metrics. ``pause`` is called after each step of the task.
        Raise Interrupted if a stop is requested.
        """

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait for at most ``seconds``. Raise the error of a worker's failure that ends the run.

        A wait may return early if a stop is requested.
        """

    @abstractmethod
    def serve(self, version: int, folder: Path) -> None:
        """Make the engine serve the draft in ``folder``. Raise RunError if it cannot be pushed.

        The first draft is loaded from the folder; later drafts are pushed.
        """

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], seed: int) -> Pass:
        """Answer prompts with the settings of section ``decode``.

        If a stop is requested, raise Interrupted after the portions of prompts in progress.
        """
