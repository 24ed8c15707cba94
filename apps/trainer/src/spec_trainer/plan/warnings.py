"""Collect the warnings about a run, which ``plan`` shows and ``train`` logs at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_trainer.plan.activations import activations_warning
from spec_trainer.plan.end_tokens import end_token_warning, marks_warning
from spec_trainer.run.draft_folder import fresh_head_warning, position_warning
from spec_trainer.run.few_steps import few_steps_warning
from spec_trainer.run.serving import unserved

if TYPE_CHECKING:
    from spec_trainer.plan.memory import RunSizes
    from spec_trainer.run.spec import RunSpec


def run_warnings(run: RunSpec, sizes: RunSizes, more_steps: str | None = None) -> list[str]:
    """Return a line for each reason to expect a poor draft or too little memory.

    ``more_steps``: what a user has to do for more steps, if not to set configuration keys.
    """
    found = (
        few_steps_warning(run.config.train, run.schedule.total_steps, more_steps),
        end_token_warning(run.dataset.train, run.target),
        marks_warning(run.dataset.report),
        position_warning(run.draft, run.target),
        fresh_head_warning(run.draft, run.target),
        activations_warning(run, sizes),
        unserved(run.target, run.draft),
    )
    return [warning for warning in found if warning is not None]
