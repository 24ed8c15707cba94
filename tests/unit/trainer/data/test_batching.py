"""Global batches are a pure function of the step; ranks and engines only partition them."""

import random
import threading
from collections import Counter
from dataclasses import dataclass

import pytest

from spec_trainer.data.batching import EpochBatches, capture_batches, shares


@dataclass(frozen=True)
class Item:
    sample_id: int
    length: int

    def __len__(self) -> int:
        return self.length


def items(count, seed=0, longest=100):
    rng = random.Random(seed)
    return [Item(number, rng.randint(2, longest)) for number in range(count)]


def batches(samples, tokens=256, seed=7, shuffle=True):
    return EpochBatches(samples, tokens, seed=seed, shuffle=shuffle)


@pytest.mark.parametrize("seed", range(20))
def test_an_epoch_visits_every_sample_once_within_the_budget(seed):
    samples = items(50, seed)
    plan = batches(samples, seed=seed)
    for epoch in range(3):
        first = sum(plan.steps_in_epoch(earlier) for earlier in range(epoch))
        parts = [plan.batch(first + index) for index in range(plan.steps_in_epoch(epoch))]
        assert {part.epoch for part in parts} == {epoch}
        assert sorted(i for part in parts for i in part.sample_ids) == list(range(50))
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            used = sum(len(samples[i]) for i in part.sample_ids)
            assert used <= 256
            if following:
                assert used + len(samples[following.sample_ids[0]]) > 256


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("longest", [2, 40, 100])
def test_steps_of_many_epochs_are_those_of_each(longest, shuffle):
    samples = items(37, longest=longest)
    plan = batches(samples, shuffle=shuffle)
    for epochs in (1, 7, 150):
        assert plan.steps_in_epochs(epochs) == sum(plan.steps_in_epoch(epoch) for epoch in range(epochs))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("longest", [2, 100])
def test_steps_of_a_number_of_epochs_that_nobody_trains_are_told_at_once(longest):
    plan = batches(items(30, longest=longest))
    mean = plan.steps_in_epochs(300) / 300
    assert plan.steps_in_epochs(10**12) == pytest.approx(mean * 10**12, rel=0.02)


def test_a_sample_beyond_the_budget_is_a_batch_of_its_own():
    samples = [Item(0, 10), Item(1, 500), Item(2, 10), Item(3, 10)]
    plan = batches(samples, tokens=20, shuffle=False)
    assert [plan.batch(step).sample_ids for step in range(3)] == [(0,), (1,), (2, 3)]


def test_any_step_is_the_same_whatever_was_asked_before():
    samples = items(60)
    plan = batches(samples)
    in_order = [plan.batch(step) for step in range(80)]
    assert in_order[-1].epoch >= 3
    steps = list(range(80))
    random.Random(3).shuffle(steps)
    asked = batches(samples)
    for step in steps:
        assert asked.batch(step) == in_order[step]
        assert batches(samples).batch(step) == in_order[step]


def test_order_depends_on_seed_and_epoch_and_without_shuffling_on_neither():
    samples = items(60)
    plan, other = batches(samples, tokens=10**6), batches(samples, tokens=10**6, seed=8)
    orders = {plan.batch(0).sample_ids, plan.batch(1).sample_ids, other.batch(0).sample_ids}
    assert len(orders) == 3
    plain = batches(samples, tokens=10**6, shuffle=False)
    assert plain.batch(0).sample_ids == plain.batch(5).sample_ids == tuple(range(60))


def test_the_order_of_a_seed_never_changes():
    # Written down: a resumed run relies on it across versions of numpy and of this code.
    plan = batches([Item(number, 10) for number in range(8)], tokens=40, seed=1)
    assert [plan.batch(step).sample_ids for step in range(4)] == [
        (2, 4, 7, 5),
        (0, 6, 3, 1),
        (5, 6, 3, 0),
        (7, 2, 1, 4),
    ]


def test_samples_keep_their_own_ids():
    samples = [Item(100, 5), Item(101, 5)]
    assert batches(samples, shuffle=False).batch(0).sample_ids == (100, 101)


def test_threads_may_ask_at_once():
    samples = items(200)
    expected = [batches(samples).batch(step) for step in range(60)]
    plan, wrong = batches(samples), []

    def ask(offset):
        for step in range(60):
            wrong.extend(
                [step] if plan.batch((step * 7 + offset) % 60) != expected[(step * 7 + offset) % 60] else []
            )

    threads = [threading.Thread(target=ask, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("seed", range(50))
def test_shares_hold_every_sample_once_in_the_asked_shape(seed):
    rng = random.Random(seed)
    lengths = {number: rng.randint(2, 4096) for number in rng.sample(range(1000), rng.randint(1, 80))}
    world, accumulation = rng.randint(1, 8), rng.randint(1, 4)
    cut = shares(list(lengths), lengths, world, accumulation)
    assert len(cut) == world
    assert {len(rank) for rank in cut} == {accumulation}
    assert Counter(i for rank in cut for part in rank for i in part) == Counter(lengths.keys())
    assert cut == shares(rng.sample(list(lengths), len(lengths)), lengths, world, accumulation)


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_balanced_to_one_sample(seed):
    rng = random.Random(seed)
    lengths = {number: rng.randint(2, 2048) for number in range(200)}
    loads = [sum(lengths[i] for i in part) for rank in shares(range(200), lengths, 4, 2) for part in rank]
    # The last sample that went to the heaviest part made it so; all others were at least as heavy before.
    assert max(loads) - min(loads) <= max(lengths.values())
    assert max(loads) <= 1.05 * sum(loads) / len(loads)


def test_few_samples_fill_the_first_pass_of_every_rank_first():
    lengths = dict.fromkeys(range(3), 10)
    assert shares([0, 1, 2], lengths, 2, 2) == (((0,), (2,)), ((1,), ()))


@pytest.mark.parametrize("seed", range(20))
def test_capture_batches_hold_every_sample_once_within_the_padded_budget(seed):
    rng = random.Random(seed)
    lengths = {number: rng.randint(2, 600) for number in range(60)}
    cut = capture_batches(list(lengths), lengths, 1024)
    assert Counter(i for batch in cut for i in batch) == Counter(lengths.keys())
    assert all(len(batch) * max(lengths[i] for i in batch) <= 1024 for batch in cut)
    flat = [lengths[i] for batch in cut for i in batch]
    assert flat == sorted(flat, reverse=True)
    assert cut == capture_batches(rng.sample(list(lengths), 60), lengths, 1024)


def test_a_sample_beyond_the_engines_budget_is_captured_alone():
    assert capture_batches([0, 1, 2], {0: 5, 1: 50, 2: 5}, 10) == [(1,), (0, 2)]
