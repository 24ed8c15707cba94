"""Which samples are held out."""

import random

import pytest

from spec_core.errors import DataError

from .conftest import TOKENS, numbers, read


def test_held_out_samples_are_the_same_ones_in_any_order_of_rows(write):
    rows = numbers(40)
    shuffled = random.Random(1).sample(rows, len(rows))
    first = read(write(*rows), eval_samples=5)
    second = read(write(*shuffled), eval_samples=5)
    contents = [sorted(tuple(s.input_ids.tolist()) for s in data.held_out) for data in (first, second)]
    assert contents[0] == contents[1]
    assert len(first.held_out) == 5
    assert len(first.train) == 35
    assert first.report.held_out == 5


def test_repeats_of_a_held_out_row_are_not_trained_on(write):
    rows = numbers(20)
    dataset = read(write(*rows, *rows), eval_samples=3)
    held_out = {tuple(sample.input_ids.tolist()) for sample in dataset.held_out}
    assert len(held_out) == 3
    assert held_out.isdisjoint(tuple(sample.input_ids.tolist()) for sample in dataset.train)
    assert dataset.report.dropped["repeats a held-out row"].count == 3


def test_by_default_a_tenth_but_at_most_64_samples_are_held_out(write):
    assert len(read(write(*numbers(50)), eval_samples=None).held_out) == 5
    assert len(read(write(*numbers(9)), eval_samples=None).held_out) == 0
    many = [{"input_ids": [i % 300, i // 300], "loss_mask": [1, 1]} for i in range(700)]
    assert len(read(write(*many), eval_samples=None).held_out) == 64


def test_holding_out_everything_is_refused(write):
    with pytest.raises(DataError, match="eval_samples=3 leaves nothing of 3 samples"):
        read(write(*numbers(3)), eval_samples=3)
    with pytest.raises(DataError, match="leaves nothing to train on"):
        read(write(TOKENS, TOKENS, TOKENS), eval_samples=1)


def test_an_eval_path_is_held_out_as_a_whole(write):
    path, eval_path = write(*numbers(4)), write(*numbers(3, start=50), name="eval.jsonl")
    dataset = read(path, eval_path=eval_path, eval_samples=None)
    assert (len(dataset.train), len(dataset.held_out)) == (4, 3)
    assert dataset.held_out[0].where.endswith("eval.jsonl:1")
