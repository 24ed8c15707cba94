"""Which tokens the draft's head keeps."""

import torch

from spec_kit.drafting.draft_vocabulary import mapping, select_tokens


def test_most_frequent_tokens_ascending_with_ties_to_the_smaller_id():
    counts = torch.tensor([0, 5, 9, 5, 5, 0])
    assert select_tokens(counts, 6, 3, ()).tolist() == [1, 2, 3]


def test_end_tokens_are_always_kept():
    counts = torch.tensor([4, 5, 9, 0, 5, 0])
    assert select_tokens(counts, 6, 3, (3, 5)).tolist() == [2, 3, 5]


def test_unseen_tokens_fill_up_ascending():
    counts = torch.tensor([0, 0, 0, 7, 0, 0])
    assert select_tokens(counts, 6, 4, (5,)).tolist() == [0, 1, 3, 5]


def test_no_counts_count_as_all_equal():
    assert select_tokens(None, 6, 3, (4,)).tolist() == [0, 1, 4]


def test_counts_are_not_changed():
    counts = torch.tensor([1, 2, 3])
    select_tokens(counts, 3, 2, (0,))
    assert counts.tolist() == [1, 2, 3]


def test_mapping_is_the_offset_to_the_target_id():
    found = mapping(torch.tensor([1, 4, 5]), 7)
    assert found["d2t"].dtype == torch.int64
    assert found["d2t"].tolist() == [1, 3, 3]
    assert found["t2d"].dtype == torch.bool
    assert found["t2d"].nonzero().squeeze(1).tolist() == [1, 4, 5]
