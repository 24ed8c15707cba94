"""The summary of a round: figures of the run and of the evaluation, what was chosen, and how the draft is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_trainer.cli.target_quickstart.cost import can_pay, cost_of
from spec_trainer.cli.target_quickstart.figures import expected_speedups
from spec_trainer.cli.target_quickstart.folder import Round, read_document
from spec_trainer.cli.target_quickstart.prompts import THE_TARGET
from spec_trainer.cli.target_quickstart.training import MORE_STEPS, resolved_run
from spec_trainer.cli.target_quickstart.work import Work
from spec_trainer.run.few_steps import few_steps_warning
from spec_trainer.run.serving import serving_commands


def outcome(work: Work, one: Round) -> dict[str, Any]:
    """Return the summary of a round whose figures were measured."""
    run = resolved_run(work, one)
    figures = read_document(one.figures)
    counts, recipe = read_document(one.prompt_counts), read_document(one.recipe)
    cost = read_document(work.folder.cost) if work.folder.cost.exists() else cost_of(figures)
    speedups = expected_speedups(cost, figures["acceptance_per_position"])
    best = max(speedups, key=speedups.__getitem__, default=figures["num_draft_tokens"])
    few = few_steps_warning(run.config.train, run.schedule.total_steps, MORE_STEPS)
    summary = run.directory.read_summary()
    return {
        **summary,
        **figures,
        "description": f"{_of_prompts(counts)}. {_of_training(recipe, work)}. {_of_cost(cost)}.",
        "warnings": [
            *figures["warnings"],
            *filter(None, [few, None if can_pay(cost) else cost["verdict"]]),
        ],
        "breakdown": cost,
        "prompts": {**counts, "held_out": figures["prompts"]},
        "recipe": recipe,
        "rounds": [
            {"budget_s": past.budget_s, "spent_s": {**past.spent, "interrupted": past.interrupted_s}}
            for past in work.folder.rounds
        ],
        "expected_speedups": {str(count): round(value, 2) for count, value in speedups.items()},
        "served_draft_tokens": best,
        "draft": str(one.draft),
        "report": str(work.folder.report),
        "serve": serving_commands(run.target, run.draft, one.draft, best),
    }


def printed_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that the command prints at its end."""
    alone = summary["throughput"][0]
    return {
        "acceptance length, greedy": round(summary["greedy"]["acceptance_length"], 2),
        "acceptance length, temperature 1": round(summary["sampled"]["acceptance_length"], 2),
        f"speed-up, one answer at a time, {summary['num_draft_tokens']} draft tokens": round(
            alone["speedup"], 2
        ),
        "expected speed-up by draft tokens": summary["expected_speedups"],
        "one answer at a time": summary["breakdown"]["verdict"],
        "seconds": round(sum(sum(one["spent_s"].values()) for one in summary["rounds"])),
        "draft": summary["draft"],
        "report": summary["report"],
    }


def _of_prompts(counts: Mapping[str, Any]) -> str:
    if counts["source"] == THE_TARGET:
        how = "written by the target itself behind its chat template's beginning (Magpie, arXiv 2406.08464)"
    else:
        how = f"of {counts['source']}"
    left_out = ", ".join(f"{counts[why]} {why}" for why in ("repeated", "unfinished", "unusable"))
    return f"Prompts: {counts['prompts']} {how}; left out: {left_out}"


def _of_training(recipe: Mapping[str, Any], work: Work) -> str:
    return f"Draft {work.request.draft}, trained on {recipe['training_tokens']:,} tokens of the target's own answers"


def _of_cost(cost: Mapping[str, Any]) -> str:
    return f"One answer at a time: {cost['verdict']}"
