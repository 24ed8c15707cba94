"""Learning rates against values worked out by hand."""

import pytest

from spec_trainer.configuration.run import TrainConfig
from spec_trainer.training.learning_rate import learning_rate


def rates(total: int, **config) -> list[float]:
    train = TrainConfig(lr=2.0, **config)
    return [learning_rate(step, total, train) for step in range(total)]


def test_warm_up_is_a_straight_line_to_the_peak():
    for schedule in ("cosine", "wsd", "constant"):
        assert rates(12, warmup_steps=4, schedule=schedule)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_warm_up_longer_than_the_run():
    assert rates(3, warmup_steps=10) == pytest.approx([0.2, 0.4, 0.6])


def test_cosine():
    # Eight steps after the warm-up are the angles 160°, 140°, …, 20° of 1 − cos.
    decay = [1.9396926, 1.7660444, 1.5, 1.1736482, 0.8263518, 0.5, 0.2339556, 0.0603074]
    assert rates(12, warmup_steps=4)[4:] == pytest.approx(decay, rel=1e-6)


def test_cosine_ends_above_its_floor():
    last = rates(12, warmup_steps=4, min_lr_ratio=0.5)[-1]
    assert last == pytest.approx(2 * (0.5 + 0.5 * 0.0301537), rel=1e-6)


def test_wsd_is_flat_and_then_a_straight_line():
    # A quarter of twenty steps decays: 5/6, 4/6, …, 1/6 of the peak.
    line = rates(20, warmup_steps=2, schedule="wsd", decay_share=0.25)
    assert line[2:15] == [2.0] * 13
    assert line[15:] == pytest.approx([2 * left / 6 for left in (5, 4, 3, 2, 1)])


def test_wsd_decays_at_most_all_that_is_left_by_the_warm_up():
    line = rates(10, warmup_steps=6, schedule="wsd", decay_share=1.0, min_lr_ratio=0.5)
    assert line[6:] == pytest.approx([2 * (0.5 + 0.5 * left / 5) for left in (4, 3, 2, 1)])


def test_constant():
    assert rates(6, warmup_steps=0, schedule="constant") == [2.0] * 6


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3, 50])
def test_no_step_is_lost(schedule, total):
    """Every step trains, the last one too, and none above the peak."""
    assert all(0 < rate <= 2 for rate in rates(total, warmup_steps=1, schedule=schedule))
