"""LiveMeasurements lets the run's engine measure the current draft at regular steps of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from spec_trainer.run.draft_trainer import DraftTrainer
    from spec_trainer.run.spec import RunSpec

_KEPT = ("serving_version", "serving_acceptance_length")
"""Fields that every record of a step has after the first measurement."""


class Measure(Protocol):
    """Function that makes the run's engine serve an exported draft and answer the held-out prompts."""

    def __call__(self, version: int, folder: Path) -> Future[dict[str, Any]]:
        """Begin to measure the draft that was exported after ``version`` steps.

        The returned future gives fields for a row of metrics.
        """
        ...


class LiveMeasurements:
    """Decides after which steps the draft is measured, and exports the draft for the measurement."""

    def __init__(self, spec: RunSpec, measure: Measure | None) -> None:
        """Prepare to measure every ``train.serve_every`` steps; ``measure`` is None except on rank 0."""
        self._every = spec.config.train.serve_every
        self._last_step = spec.schedule.total_steps
        self._directory = spec.directory
        self._target = spec.target
        self._chat = spec.config.data
        self._measure = measure
        self._newest: Future[dict[str, Any]] | None = None
        self._unsaid: dict[str, Any] = {}
        """Fields of the newest measurement that were not yet written to a record."""
        self._serving: dict[str, Any] = {}

    def is_due(self, done_steps: int) -> bool:
        """Return whether to measure after ``done_steps`` steps; the same on every rank."""
        return bool(self._every) and (done_steps % self._every == 0 or done_steps == self._last_step)

    def begin(self, done_steps: int, trainer: DraftTrainer) -> None:
        """Export the current draft and begin to measure it. Collective, because the weights are gathered.

        Wait until the previous measurement has finished; after the last step, also wait for this measurement.
        """
        if self._newest is not None:
            self._unsaid = self._newest.result()
        folder = self._directory.served_draft(done_steps)
        trainer.export(self._target, folder, self._chat)
        if self._measure is not None:
            self._newest = self._measure(done_steps, folder)
            if done_steps == self._last_step:
                self._newest.result()

    def new_fields(self) -> dict[str, Any]:
        """Return the figures of the draft that was measured last, for a row of metrics.

        Results that no row has had are included.
        """
        if self._newest is not None and self._newest.done():
            self._unsaid = self._newest.result()
            self._newest = None
        fields, self._unsaid = self._unsaid, {}
        self._serving |= {key: fields[key] for key in _KEPT if key in fields}
        return self._serving | fields
