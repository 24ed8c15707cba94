"""Cycles and their prompts are pure functions of the configuration and a number."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from spec_trainer.live.cycles import cycles_left, prompts_of


def run_of(*, every=10, push_every=10, total=35, num_prompts=7, prompts=3, seed=0, shuffle=True):
    samples = [SimpleNamespace(prompt=np.array([number], dtype=np.int32)) for number in range(num_prompts)]
    return SimpleNamespace(
        config=SimpleNamespace(
            decode=SimpleNamespace(every=every, prompts=prompts),
            train=SimpleNamespace(push_every=push_every),
            data=SimpleNamespace(shuffle=shuffle),
            seed=seed,
        ),
        schedule=SimpleNamespace(total_steps=total),
        source=SimpleNamespace(train=samples),
    )


def places(run, done_steps):
    return [(cycle.number, cycle.steps, cycle.version) for cycle in cycles_left(run, done_steps)]


def test_cycles_end_with_the_run_and_each_has_the_draft_of_its_first_step():
    assert places(run_of(), 0) == [
        (0, range(10), 0),
        (1, range(10, 20), 10),
        (2, range(20, 30), 20),
        (3, range(30, 35), 30),
    ]


def test_a_draft_is_served_until_the_next_push_and_without_pushes_for_ever():
    assert [version for *_, version in places(run_of(push_every=20), 0)] == [0, 0, 20, 20]
    assert [version for *_, version in places(run_of(push_every=0), 0)] == [0, 0, 0, 0]


@pytest.mark.parametrize(("done_steps", "first"), [(9, 0), (10, 1), (11, 1), (30, 3), (34, 3), (35, 3)])
def test_what_is_left_begins_with_the_cycle_of_the_next_step(done_steps, first):
    assert places(run_of(), done_steps) == places(run_of(), 0)[first:]


@pytest.mark.parametrize("prompts", [3, 7, 20])
def test_prompts_come_once_in_every_pass_in_an_order_that_follows_from_the_seed(prompts):
    run = run_of(prompts=prompts)
    row = [prompt[0] for cycle in range(7) for prompt in prompts_of(run, cycle)]
    assert [Counter(row[start : start + 7]) for start in range(0, 21, 7)] == [Counter(range(7))] * 3
    assert row[:7] != row[7:14]
    assert prompts_of(run, 2) == prompts_of(run_of(prompts=prompts), 2) != prompts_of(run_of(seed=1), 2)


def test_unshuffled_prompts_have_the_order_of_the_data():
    run = run_of(shuffle=False)
    assert [prompts_of(run, cycle) for cycle in (0, 2)] == [[[0], [1], [2]], [[6], [0], [1]]]
