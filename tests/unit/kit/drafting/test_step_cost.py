"""Costs of samples, against arithmetic by hand."""

from spec_kit.drafting import StepCost, num_weights


def test_a_cost_is_the_sum_of_its_parts():
    cost = StepCost(per_token=3, per_row=100, token_channels=5, row_channels=7)
    assert cost(10, 4) == 10 * 3 + 4 * 100 + 24 * (5 * 10 * 5 + 7 * 4 * 8)


def test_a_window_limits_what_a_query_is_compared_with():
    cost = StepCost(per_token=0, per_row=0, token_channels=1, row_channels=1, window=6)
    assert cost(10, 4) == 24 * (10 * 5 + 4 * 6)


def test_rows_are_counted_as_asked():
    cost = StepCost(per_token=1, per_row=10, num_rows=lambda supervised: min(supervised, 3))
    assert [cost(8, supervised) for supervised in (0, 2, 3, 8)] == [8, 28, 38, 38]


def test_only_matrices_have_weights_that_count():
    assert num_weights([(3, 4), (7,), (2, 5)]) == 22
