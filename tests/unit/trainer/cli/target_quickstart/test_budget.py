"""Budgets, and how the time of a round is divided over its stages."""

import pytest

from spec_core.errors import ConfigError
from spec_trainer.cli.target_quickstart.budget import ANSWERS, PROMPTS, REPORT, SHARES, time_for
from spec_trainer.cli.target_quickstart.request import parse_budget


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_a_budget_has_a_unit(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "5s", "10 minutes", "1e9h", "9999999h", "nan"])
def test_other_budgets_are_refused(text):
    with pytest.raises(ConfigError, match=r"^--budget=.*expected a time of 20s to 30 days, such as 90s"):
        parse_budget(text)


def test_all_stages_together_take_the_budget():
    spent = {}
    for stage in SHARES:
        spent[stage] = time_for(stage, 600, spent)
    assert sum(spent.values()) == pytest.approx(600)
    assert spent[PROMPTS] == pytest.approx(60)


def test_what_a_stage_leaves_goes_to_the_others():
    alone = time_for(ANSWERS, 600, {PROMPTS: 60, "cost": 72})
    assert time_for(ANSWERS, 600, {PROMPTS: 0, "cost": 0}) == pytest.approx(alone * 600 / 468)


def test_a_late_stage_gets_nothing_if_the_time_is_over():
    spent = {stage: 150.0 for stage in SHARES if stage != REPORT}
    assert time_for(REPORT, 600, spent) == 0
