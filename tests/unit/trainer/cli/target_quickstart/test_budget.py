"""Budgets, and how the time of a round is divided over its stages."""

import pytest

from spec_core.errors import ConfigError
from spec_trainer.cli.target_quickstart.budget import (
    ANSWERS,
    COST,
    FIGURES,
    PROMPTS,
    REPORT,
    SHARES,
    STARTS_S,
    TRAINING,
    time_for,
)
from spec_trainer.cli.target_quickstart.request import parse_budget


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_a_budget_has_a_unit(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "5s", "10 minutes", "1e9h", "9999999h", "nan"])
def test_other_budgets_are_refused(text):
    with pytest.raises(ConfigError, match=r"^--budget=.*expected a time of 20s to 30 days, such as 90s"):
        parse_budget(text)


def times(budget_s, slow_starts=()):
    spent = {}
    for stage in SHARES:
        spent[stage] = time_for(stage, budget_s, spent, slow_starts).whole_s
    return spent


def test_all_stages_together_take_the_budget():
    spent = times(600)
    assert sum(spent.values()) == pytest.approx(600)
    assert spent[PROMPTS] == pytest.approx(60)


@pytest.mark.parametrize("slow", [tuple(STARTS_S), (PROMPTS, FIGURES)])
@pytest.mark.parametrize("budget_s", [60, 600, 6000])
def test_starts_of_a_slow_engine_take_time_of_their_own(budget_s, slow):
    spent = times(budget_s, slow)
    assert sum(spent.values()) == pytest.approx(budget_s)
    scale = min(1, 0.7 * budget_s / sum(STARTS_S[stage] for stage in slow))
    starts = {stage: scale * STARTS_S[stage] if stage in slow else 0.0 for stage in SHARES}
    assert time_for(PROMPTS, budget_s, {}, slow).starts_s == pytest.approx(starts[PROMPTS])
    worked = {stage: spent[stage] - starts[stage] for stage in (COST, ANSWERS, TRAINING, FIGURES)}
    assert worked[COST] / worked[ANSWERS] == pytest.approx(SHARES[COST] / SHARES[ANSWERS])
    assert worked[TRAINING] / worked[ANSWERS] == pytest.approx(SHARES[TRAINING] / SHARES[ANSWERS])
    assert worked[FIGURES] / worked[ANSWERS] == pytest.approx(SHARES[FIGURES] / SHARES[ANSWERS])


def test_what_a_stage_leaves_goes_to_the_others():
    alone = time_for(ANSWERS, 600, {PROMPTS: 60, COST: 72}).work_s
    assert time_for(ANSWERS, 600, {PROMPTS: 0, COST: 0}).work_s == pytest.approx(alone * 600 / 468)


def test_a_late_stage_gets_nothing_if_the_time_is_over():
    spent = {stage: 150.0 for stage in SHARES if stage != REPORT}
    assert time_for(REPORT, 600, spent).whole_s == 0


@pytest.mark.parametrize("slow", [(), (PROMPTS, FIGURES)])
def test_figures_get_no_more_than_they_can_use(slow):
    spent = {PROMPTS: 360.0, COST: 0.0, ANSWERS: 860.0}
    before = time_for(TRAINING, 3600, spent, slow)
    figures = time_for(FIGURES, 3600, spent, slow)
    training = time_for(TRAINING, 3600, spent, slow, 60.0)
    assert time_for(FIGURES, 3600, spent, slow, 60.0) == (figures.starts_s, 60.0)
    share = SHARES[TRAINING] / (SHARES[TRAINING] + SHARES[REPORT])
    assert training.work_s - before.work_s == pytest.approx(share * (figures.work_s - 60))
    assert time_for(TRAINING, 3600, spent, slow, figures.work_s + 1).work_s == pytest.approx(before.work_s)
