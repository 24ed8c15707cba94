"""Measurement lets the run's engine serve the current draft and answer the held-out prompts with it."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from spec_trainer.base.stop_request import Interrupted
from spec_trainer.run.metrics import StepLines
from spec_trainer.run.spec import RunSpec
from spec_trainer.workers.decoded_folder import DecodedFolder
from spec_trainer.workers.passes import Pass
from spec_trainer.workers.run_driver import RunDriver

log = logging.getLogger(__name__)


class Measurement(AbstractContextManager["Measurement"]):
    """Measures exported drafts, and writes a line to ``measurements.jsonl`` for each."""

    def __init__(self, spec: RunSpec, driver: RunDriver) -> None:
        """Prepare to measure drafts with the engine of ``driver``."""
        self._driver = driver
        self._prompts = spec.serving_prompts
        self._seed = spec.config.seed % 2**31  # the same for every draft
        self._folder = DecodedFolder(spec.directory)
        self._lines = StepLines(spec.directory.measurements)

    def measure(self, version: int, folder: Path) -> dict[str, Any]:
        """Serve the draft in ``folder``, answer the held-out prompts, and return the figures.

        Return an empty dict if a stop is requested meanwhile. ``version``: the number of steps of the draft.
        """
        start = time.perf_counter()
        self._driver.serve(version, folder)
        self._folder.keep_only(version)
        try:
            answered = self._driver.answer(self._prompts, self._seed)
        except Interrupted:
            return {}
        figures = {**_figures(version, answered), "serving_s": time.perf_counter() - start}
        self._lines.write({"step": version, **figures})
        log.info(
            "the draft after %d steps has tau %.2f in the engine, which decodes %.0f tokens/s",
            *(version, answered.counters.acceptance_length, answered.tokens_per_s),
        )
        return figures

    def __exit__(self, *exc: object) -> None:
        """Close the file."""
        self._lines.__exit__(*exc)


def _figures(version: int, answered: Pass) -> dict[str, Any]:
    counters, per_request = answered.counters, answered.acceptance_length_per_request
    return {
        "serving_version": version,
        "serving_acceptance_length": counters.acceptance_length,
        **({} if per_request is None else {"serving_acceptance_length_per_request": per_request}),
        "serving_acceptance_per_position": list(counters.acceptance_per_position),
        "serving_rounds": counters.rounds,
        "serving_tokens": answered.num_tokens,
        "serving_tokens_per_s": answered.tokens_per_s,
    }
