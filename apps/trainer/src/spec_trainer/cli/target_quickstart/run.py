"""``spec-trainer quickstart --target``: from a target to a measured draft, within a budget of time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spec_core.errors import RunError
from spec_trainer.base.disk import write_atomically
from spec_trainer.base.stop_request import Interrupted
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.cli.target_quickstart.answers import answer_round, unanswered
from spec_trainer.cli.target_quickstart.budget import (
    ANSWERS,
    COST,
    FIGURES,
    PROMPTS,
    REPORT,
    SHARES,
    TRAINING,
    StageTime,
    time_for,
)
from spec_trainer.cli.target_quickstart.cost import can_pay, measure_cost
from spec_trainer.cli.target_quickstart.engine import AnsweringEngine
from spec_trainer.cli.target_quickstart.figures import decode_held_out, measure_draft, most_s
from spec_trainer.cli.target_quickstart.folder import (
    Round,
    read_all,
    read_document,
    write_document,
    write_rows,
)
from spec_trainer.cli.target_quickstart.kept_questions import KeptQuestions
from spec_trainer.cli.target_quickstart.outcome import outcome
from spec_trainer.cli.target_quickstart.prompts import rows_of_data, sample_questions, words_of
from spec_trainer.cli.target_quickstart.recipe import most_prompts, prompts_held_out
from spec_trainer.cli.target_quickstart.request import TargetQuickstart
from spec_trainer.cli.target_quickstart.stage_clock import charged
from spec_trainer.cli.target_quickstart.training import resolved_run, train_draft
from spec_trainer.cli.target_quickstart.work import Work, check_request
from spec_trainer.report.page import report_page
from spec_trainer.run.model_card import evaluation_section, write_run_card

log = logging.getLogger(__name__)

_HELD_OUT_SHARE = 0.25
"""Largest share of the first round's prompts that is held out."""
_TITLES = {
    PROMPTS: "collecting prompts",
    COST: "measuring what a draft costs here",
    ANSWERS: "answering the prompts with the target",
    TRAINING: "training the draft",
    FIGURES: "measuring the draft on held-out prompts",
    REPORT: "writing the report",
}


def run_target_quickstart(request: TargetQuickstart) -> dict[str, Any]:
    """Train a draft within the budget, measure it, write the report, and return the summary.

    A call goes on where another one with the same output has ended; with a larger budget it adds a round. Raise
    Interrupted if the user stops it.
    """
    work = check_request(request)
    folder = work.folder
    with folder.locked():
        folder.check(work.settings)
        folder.open(work.settings)
        log.info("%s", _description(work))
        try:
            while (one := folder.next_round(request.budget_s, REPORT)) is not None:
                _complete(work, one)
        except KeyboardInterrupt as error:
            raise Interrupted(f"interrupted; the same command goes on in {folder.root}") from error
        return read_document(folder.summary)


def _complete(work: Work, one: Round) -> None:
    """Go through the stages of a round that have not ended."""
    with AnsweringEngine(work.options, work.target) as engine:
        _go_through(work, engine, one)


def _go_through(work: Work, engine: AnsweringEngine, one: Round) -> None:
    earlier = work.folder.rounds[:-1]
    stages: Mapping[str, Callable[[StageTime], object]] = {
        PROMPTS: lambda given: _collect_prompts(work, engine, one, earlier, _once_started(given)),
        COST: lambda given: _measure_cost(work, engine, one, TimeLimit(given.whole_s)),
        ANSWERS: lambda given: answer_round(work, engine, one, earlier, _once_started(given), whole),
        TRAINING: lambda given: train_draft(work, one, earlier, TimeLimit(given.whole_s)),
        FIGURES: lambda given: write_document(
            one.figures, measure_draft(work, one, TimeLimit(given.whole_s))
        ),
        REPORT: lambda _: _write_report(work, one),
    }
    assert list(stages) == list(SHARES), "the stages have shares of the time"
    one.charge_interrupted()
    budget_s = max(0.0, one.budget_s - one.interrupted_s)
    whole = TimeLimit(budget_s - sum(one.spent.values()))
    for stage, perform in stages.items():
        spent = one.spent
        if stage in spent:
            continue
        given = time_for(stage, budget_s, spent, work.slow_starts(one.budget_s), most_s(work))
        log.info("%s: %s, %.0f s", one.root.name, _TITLES[stage], given.whole_s)
        with charged(one, stage):
            perform(given)


def _once_started(given: StageTime) -> TimeLimit:
    """Return a limit of the work that begins when the engine has started, however long that takes."""
    return TimeLimit(given.work_s, has_begun=False)


def _collect_prompts(
    work: Work, engine: AnsweringEngine, one: Round, earlier: Sequence[Round], limit: TimeLimit
) -> None:
    """Write the prompts of a round; in the first round hold some of them out."""
    left = unanswered(earlier[-1]) if earlier else []
    position = read_document(earlier[-1].prompt_counts)["position"] if earlier else 0
    wanted = most_prompts(one.budget_s, work.machine) - len(left)
    asked = [row for past in earlier for row in read_all(past.prompts)]
    if earlier:
        asked += read_all(work.folder.held_out)
    if work.request.data is not None:
        rows, counts = rows_of_data(work, asked, position, max(0, wanted))
    else:
        known = {words_of(row["messages"][0]["content"]) for row in asked}
        kept = KeptQuestions(one.questions, position)
        rows, counts = sample_questions(work, engine, known, kept, max(0, wanted), limit)
    if not earlier:
        held_out = min(prompts_held_out(one.budget_s, work.machine), int(len(rows) * _HELD_OUT_SHARE))
        if held_out < 1:
            raise RunError(
                f"only {len(rows)} usable prompts of {counts.taken}; give a larger --budget, or other --data"
            )
        write_rows(work.folder.held_out, rows[:held_out])
        rows = rows[held_out:]
    write_document(one.prompt_counts, {**counts.as_document(), "prompts": len(rows)})
    write_rows(one.prompts, [*left, *rows])


def _measure_cost(work: Work, engine: AnsweringEngine, one: Round, limit: TimeLimit) -> None:
    """Measure once what a draft costs on this machine, and warn if none can pay.

    With an engine that starts slowly only the target, because it starts anew for each number of guesses.
    """
    if work.starts_slowly:
        running = engine.started()
        if not work.folder.plain.exists():
            decode_held_out(work, running, one, limit)
        return
    if not work.folder.cost.exists():
        engine.close()  # the measurement starts its own
        write_document(work.folder.cost, measure_cost(work, one.budget_s, limit))
    cost = read_document(work.folder.cost)
    log.log(logging.INFO if can_pay(cost) else logging.WARNING, "one answer at a time: %s", cost["verdict"])


def _write_report(work: Work, one: Round) -> None:
    run = resolved_run(work, one)
    summary = outcome(work, one)
    write_document(work.folder.summary, summary)
    figures = {key: value for key, value in summary.items() if not key.startswith("acceptance_")}
    evaluated = {"Evaluation": evaluation_section(read_document(one.figures))}
    write_run_card(one.draft, run.draft, run.target, run.config, figures, evaluated)
    title = f"A draft for {work.target.folder.resolve().name}"
    write_atomically(work.folder.report, report_page(run.directory, title, summary))


def _description(work: Work) -> str:
    target, machine = work.target, work.machine
    dtype = "bfloat16" if machine.has_bfloat16 else "float32"
    return (
        f"target: {target.model_type}, {target.num_layers} layers of width {target.hidden_size}, vocabulary "
        f"{target.vocab_size:,}; machine: {machine.backend}, {len(os.sched_getaffinity(0))} cores, {dtype}; draft: "
        f"{work.request.draft}, engine: {work.engine}; all files are in {work.folder.root}"
    )
