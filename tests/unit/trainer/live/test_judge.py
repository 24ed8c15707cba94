"""Two drafts are compared answer by answer, and a difference that chance explains is none."""

import random

import numpy as np
import pytest

from spec_trainer.live.judge import DraftRounds, Gain


def rounds(lengths: list[float], tokens: int = 100) -> DraftRounds:
    return DraftRounds((tokens,) * len(lengths), tuple(tokens / length for length in lengths))


def test_a_draft_is_worth_its_tokens_for_each_verification() -> None:
    draft = DraftRounds((100, 20), (50.0, 5.0))
    assert draft.acceptance_length == 120 / 55


def test_what_a_draft_saves_is_a_share_of_all_verifications() -> None:
    before = DraftRounds((100, 20, 60), (50.0, 10.0, 30.0))
    after = DraftRounds((100, 20, 60), (40.0, 10.0, 31.0))
    gain = Gain.of(after, before)
    assert gain.saved == pytest.approx(9 / 90)
    error = np.std([10.0, 0.0, -1.0], ddof=1) / np.sqrt(3)
    assert gain.chance == pytest.approx(3 * error / 30)
    assert not gain.is_sure


def test_a_change_of_traffic_is_no_difference_of_drafts() -> None:
    """Answers differ much more from each other than the drafts do on each of them."""
    draw = random.Random(0)
    easy = [draw.uniform(1.1, 4.0) for _ in range(40)]
    before, after = rounds(easy), rounds([1.03 * length for length in easy])
    assert Gain.of(after, before).is_sure
    assert not Gain.of(before, after).is_sure
    assert not Gain.of(before, before).is_sure


def test_equal_drafts_are_hardly_ever_told_apart() -> None:
    draw = random.Random(1)
    told = 0
    for _ in range(2000):
        one, other = (rounds([draw.gauss(2.5, 0.3) for _ in range(40)]) for _ in range(2))
        told += Gain.of(one, other).is_sure
    assert told <= 12  # 0.135 % are 2.7


def test_one_answer_compares_nothing() -> None:
    with pytest.raises(ValueError, match="1 answer: expected two or more"):
        Gain.of(rounds([2.0]), rounds([1.0]))
