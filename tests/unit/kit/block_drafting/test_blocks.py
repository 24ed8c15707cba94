"""Which blocks are drawn: a pure function of (seed, epoch, sample id, mask), uniform, without replacement."""

import math
from dataclasses import replace

import pytest
import torch

from spec_core.records import DraftBatch, Span, Supervision
from spec_kit.block_drafting import BlockConfig, BlockRule, Blocks


def sample(mask, **changes):
    fields = {"sample_id": 5, "epoch": 2, "seed": 9, "loss_mask": torch.tensor(mask, dtype=torch.bool)}
    return Supervision(**(fields | changes))


def block_rule(num_anchors, num_guesses, share=1.0):
    return BlockRule(BlockConfig(num_anchors=num_anchors, anchor_share=share), num_guesses)


def test_anchors_are_supervised_tokens_before_a_supervised_one():
    anchor_A, counted_A = block_rule(100, 3).draw(sample([1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1]))
    assert anchor_A.tolist() == [0, 3, 4, 5, 6]
    assert counted_A.tolist() == [1, 3, 3, 2, 1]


@pytest.mark.parametrize("mask", [[], [1], [1, 0, 1, 0], [0, 0, 0]])
def test_mask_without_a_pair_has_no_anchor(mask):
    anchor_A, counted_A = block_rule(100, 3).draw(sample(mask))
    assert len(anchor_A) == len(counted_A) == 0


def test_as_many_as_asked_ascending_and_different():
    anchor_A, _ = block_rule(7, 3).draw(sample([1] * 50))
    assert len(anchor_A) == len(anchor_A.unique()) == 7
    assert anchor_A.equal(anchor_A.sort().values)


@pytest.mark.parametrize("change", [{"sample_id": 6}, {"epoch": 3}, {"seed": 10}])
def test_another_sample_epoch_or_seed_draws_others(change):
    rule, one = block_rule(7, 3), sample([1] * 50)
    assert rule.draw(one)[0].equal(rule.draw(one)[0])
    assert not rule.draw(one)[0].equal(rule.draw(replace(one, **change))[0])


def test_draw_ignores_and_leaves_alone_torchs_own_generator():
    torch.manual_seed(1)
    first = block_rule(7, 3).draw(sample([1] * 50))[0]
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert block_rule(7, 3).draw(sample([1] * 50))[0].equal(first)
    torch.manual_seed(1)
    assert torch.get_rng_state().equal(state)


def test_every_anchor_is_drawn_equally_often():
    counts = torch.zeros(19)
    for sample_id in range(4000):
        counts[block_rule(5, 3).draw(sample([1] * 20, sample_id=sample_id))[0]] += 1
    expected, deviation = 4000 * 5 / 19, math.sqrt(4000 * 5 / 19 * 14 / 19)
    assert ((counts - expected).abs() < 4.5 * deviation).all()


def test_batch_holds_what_its_documents_draw():
    masks = [[1] * 12, [0, 1, 1, 1, 0], [1] * 9]
    spans, start = [], 0
    for sample_id, mask in enumerate(masks):
        spans.append(Span(sample_id=sample_id, epoch=2, start=start, stop=start + len(mask)))
        start += len(mask) + 1
    mask_T = torch.zeros(start, dtype=torch.bool)
    for span, mask in zip(spans, masks, strict=True):
        mask_T[span.start : span.stop] = torch.tensor(mask).bool()
    batch = DraftBatch(
        input_ids_T=torch.zeros(start, dtype=torch.int64),
        hidden_TNH=torch.zeros(start, 1, 1),
        loss_mask_T=mask_T,
        spans=tuple(spans),
        seed=9,
    )
    blocks, rule = Blocks.of(batch, block_rule(4, 4)), block_rule(4, 4)
    for span, mask in zip(spans, masks, strict=True):
        own = blocks.start_A == span.start
        anchor_A, counted_A = rule.draw(sample(mask, sample_id=span.sample_id))
        assert (blocks.anchor_A[own] - span.start).equal(anchor_A)
        assert blocks.counted_A[own].equal(counted_A)


def test_a_share_of_the_possible_blocks_is_drawn_up_to_the_largest_number():
    one = sample([1] * 50)
    assert [len(block_rule(most, 3, 0.25).draw(one)[0]) for most in (100, 7)] == [13, 7]
    assert len(block_rule(100, 3, 0.01).draw(one)[0]) == 1


def test_an_evaluation_has_all_possible_blocks():
    assert block_rule(7, 3, 0.25).draw(sample([1] * 50, evaluates=True))[0].tolist() == list(range(49))


def test_the_rounds_of_an_engine_are_all_blocks_whatever_the_share():
    mask = torch.ones(9, dtype=torch.bool)
    rounds = Supervision(
        sample_id=1, epoch=0, loss_mask=mask, guess_depth=torch.tensor([0, 1, 2, 1, 2, 3, 1, 1, 2])
    )
    assert block_rule(100, 3, 0.25).draw(rounds)[0].tolist() == [0, 2, 5, 6]


@pytest.mark.parametrize(("possible", "blocks"), [(0, 0), (1, 1), (2, 1), (8, 3), (100, 3)])
def test_blocks_are_a_limited_share_of_those_possible(possible, blocks):
    assert BlockConfig(num_anchors=3, anchor_share=0.3).num_blocks(possible) == blocks
