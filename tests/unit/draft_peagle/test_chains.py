"""Which guesses a document trains."""

from dataclasses import replace

import pytest
import torch

from spec_core.records import Supervision
from spec_draft_peagle.chains import ChainRule


def rule(**changes) -> ChainRule:
    return ChainRule(**{"num_guesses": 4, "retention": 1.0, "least_retention": 0.0, **changes})


def sample(mask: str, **changes) -> Supervision:
    fields = {"sample_id": 0, "epoch": 0, "loss_mask": torch.tensor([letter == "1" for letter in mask])}
    return Supervision(**fields | changes)


def test_guess_counts_where_its_token_and_those_before_are_supervised():
    """Row a guesses tokens a + 2 on; the tokens that it knows need no supervision."""
    count_R, reach_R = rule().draw(sample("0011101"))
    assert count_R.tolist() == reach_R.tolist() == [3, 2, 1, 0, 1, 0]


def test_first_token_of_a_document_is_never_guessed():
    for mask in ("1", "11"):
        assert not rule().draw(sample(mask))[0].any()
    assert rule().draw(sample("111"))[0].tolist() == [1, 0]


def test_chains_end_with_the_document_and_with_the_last_guess():
    assert rule().draw(sample("1" * 8))[0].tolist() == [4, 4, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(("retention", "least"), [(0.7, 0.2), (0.5, 0.0), (0.9, 0.9)])
def test_guesses_are_kept_by_the_papers_share(retention, least):
    """Depth d keeps ⌊(n − d) · max(r^d, r_min)⌋ of n seeds where enough go on; depth 0 keeps all."""
    n = 200
    count_R, reach_R = rule(retention=retention, least_retention=least).draw(sample("1" * (n + 2)))
    counts = [int((count_R > d).sum()) for d in range(4)]
    assert counts[0] == n
    for d in range(1, 4):
        most = int((n - d) * max(retention**d, least))
        assert most - 4 <= counts[d] <= most  # a kept chain may end with the document
    assert (count_R <= reach_R).all()


def test_draw_is_a_function_of_seed_epoch_and_sample():
    one = sample("1" * 60)
    few = rule(retention=0.5)
    count_R, _ = few.draw(one)
    assert torch.equal(few.draw(one)[0], count_R)
    for change in ({"seed": 1}, {"epoch": 1}, {"sample_id": 1}):
        assert not torch.equal(few.draw(replace(one, **change))[0], count_R)


def test_every_row_is_as_likely_to_be_dropped():
    """Over many epochs each of 20 seeds keeps its second guess in ⌊19 · 0.5⌋ of 19 to 20 draws."""
    few, mask = rule(num_guesses=2, retention=0.5), "1" * 22
    kept = sum((few.draw(sample(mask, epoch=epoch))[0] == 2).float() for epoch in range(2000)) / 2000
    assert kept[:19] == pytest.approx([9 / 19] * 19, abs=0.05)


def test_judged_guesses_are_the_engines_rounds_and_none_is_dropped():
    guess_depth_T = torch.zeros(12, dtype=torch.int64)
    guess_depth_T[4], guess_depth_T[5], guess_depth_T[6], guess_depth_T[7], guess_depth_T[9] = 1, 2, 3, 1, 1
    judged = sample("0" * 3 + "1" * 9, guess_depth=guess_depth_T)
    count_R, _ = rule(retention=0.1).draw(judged)
    assert {row: n for row, n in enumerate(count_R.tolist()) if n} == {2: 3, 5: 1, 7: 1}
