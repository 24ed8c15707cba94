"""Run ``spec-trainer evaluate --breakdown``: measure what a round of a draft costs, also before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spec_trainer.cli.commands.evaluate import export_untrained
from spec_trainer.cli.engine_output import engine_output_kept
from spec_trainer.measure.evaluation.breakdown import break_down
from spec_trainer.measure.evaluation.prepare import prepare
from spec_trainer.measure.evaluation.request import EvaluationRequest
from spec_trainer.training.wiring import create_engine


def break_down_draft(request: EvaluationRequest, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the document of ``evaluate --breakdown --json``; ``words`` are ``section.key=value`` arguments."""
    with TemporaryDirectory() as scratch:
        folder = request.draft_model or _random_draft(request, Path(scratch) / "random")
        evaluation = prepare(replace(request, draft="", draft_model=folder), words)
        options, target = evaluation.options, evaluation.target
        with engine_output_kept(options.engine_type), create_engine(options, target) as engine:
            measured = break_down(engine, folder, evaluation.work)
    return {
        "target": str(target.folder),
        "draft": str(request.draft_model or f"{request.draft}, random weights"),
        "engine": options.engine_type.name,
        "engine_versions": dict(options.engine_type.probe().versions),
        "backend": options.backend.name,
        "prompts": len(evaluation.work.prompts),
        "breakdown": measured,
    }


def _random_draft(request: EvaluationRequest, folder: Path) -> Path:
    """Export a draft with random weights and default options, and return its folder."""
    from spec_core import Draft
    from spec_core.plugins import load
    from spec_kit.targets.target_reader import read_target
    from spec_trainer.base.hub import resolve_target

    draft_type = load(Draft, request.draft)
    draft = draft_type(draft_type.Config(name=request.draft))
    return export_untrained(draft, read_target(resolve_target(request.target)), folder)
