"""A run item by item: each sample once, in an order that needs no state."""

from spec_draft_dflash.config import DFlashConfig
from spec_draft_dflash.draft import DFlashDraft
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.draft import Eagle3Draft
from spec_strategy_fsdp.strategy import FsdpStrategy
from spec_trainer.run.batch_schedule import BatchSettings, GlobalBatch


def test_epochs_give_the_number_of_steps(make_schedule):
    # 12 + 8 | 10 + 10 | 5: three global batches of at most 20 tokens.
    assert make_schedule([12, 8, 10, 10, 5]).total_steps == 3
    assert make_schedule([12, 8, 10, 10, 5], epochs=4).total_steps == 12
    assert make_schedule([12, 8, 10, 10, 5], epochs=4, total_steps=5).total_steps == 5


def test_items_are_the_global_batches_in_order(make_schedule):
    schedule = make_schedule([12, 8, 10, 10, 5], total_steps=4)
    assert list(schedule.items(0)) == [
        GlobalBatch(0, False, 0, (0, 1)),
        GlobalBatch(1, False, 0, (2, 3)),
        GlobalBatch(2, False, 0, (4,)),
        GlobalBatch(3, False, 1, (0, 1)),
    ]


def test_evaluations_stand_between_the_steps_that_they_follow(make_schedule):
    schedule = make_schedule([20, 20, 20], held_out=[9, 9, 9], eval_every=2)
    kinds = [(item.step, item.evaluates, item.sample_ids) for item in schedule.items(0)]
    assert kinds == [
        (0, False, (0,)),
        (1, False, (1,)),
        (2, True, (3, 4)),
        (2, True, (5,)),
        (2, False, (2,)),
        (3, True, (3, 4)),
        (3, True, (5,)),
    ]


def test_without_held_out_data_nothing_is_evaluated(make_schedule):
    assert not any(item.evaluates for item in make_schedule([5, 5], eval_every=1).items(0))


def test_last_step_is_always_evaluated(make_schedule):
    schedule = make_schedule([20, 20], held_out=[5])
    assert [schedule.evaluates_after(done) for done in range(3)] == [False, False, True]


def test_what_is_left_is_the_tail_of_all(make_schedule):
    schedule = make_schedule([7] * 20, held_out=[5], eval_every=3, shuffle=True, epochs=2)
    everything = list(schedule.items(0))
    for done in (1, 4, 9):
        tail = list(schedule.items(done))
        assert everything[-len(tail) :] == tail
        assert tail[0] == schedule.train_item(done)


def test_shares_hold_every_sample_once_in_equally_many_passes(make_schedule):
    schedule = make_schedule(list(range(1, 30)), global_batch_tokens=60, ranks=3, accumulation=2)
    for item in schedule.items(0):
        shares = schedule.shares(item)
        assert [len(share) for share in shares] == [2, 2, 2]
        flat = [sample for share in shares for part in share for sample in part]
        assert sorted(flat) == sorted(item.sample_ids)
        assert schedule.destinations(item) == {
            sample: (rank,) for rank, share in enumerate(shares) for part in share for sample in part
        }


def test_imbalance_is_the_largest_micro_batches_over_the_mean_share(make_schedule):
    assert (
        make_schedule([3, 4, 5], global_batch_tokens=12).imbalance(GlobalBatch(0, False, 0, (0, 1, 2))) == 1
    )
    (item,) = (schedule := make_schedule([6, 5, 2], ranks=2)).items(0)
    assert schedule.shares(item) == (((0,),), ((1, 2),))
    assert schedule.imbalance(item) == 7 / 6.5
    (item,) = (schedule := make_schedule([6, 5, 2], ranks=2, accumulation=2)).items(0)
    assert schedule.shares(item) == (((0,), (2,)), ((1,), ()))
    assert schedule.imbalance(item) == (6 + 2) / 6.5


def squares(num_tokens, num_supervised):
    return num_tokens**2


def test_costs_are_balanced_instead_of_tokens(make_schedule):
    (item,) = (schedule := make_schedule([6, 4, 4, 3], sample_flops=squares, ranks=2)).items(0)
    assert schedule.shares(item) == (((0,),), ((1, 2, 3),))
    assert schedule.cost_imbalance(item) == 41 / 38.5
    assert schedule.imbalance(item) == 11 / 8.5
    by_tokens = make_schedule([6, 4, 4, 3], sample_flops=squares, ranks=2, balance="tokens")
    assert by_tokens.shares(item) == (((0, 3),), ((1, 2),))
    assert by_tokens.cost_imbalance(item) == 45 / 38.5
    assert by_tokens.imbalance(item) == 9 / 8.5


def test_a_cost_reads_the_number_of_supervised_tokens(make_schedule):
    asked = []
    schedule = make_schedule([5, 3], sample_flops=lambda *counts: asked.append(counts) or 1)
    schedule.shares(next(schedule.items(0)))
    assert asked == [(5, 4), (3, 2)]


def test_without_a_cost_of_the_draft_tokens_are_balanced(make_schedule):
    settings = {"global_batch_tokens": 60, "ranks": 3, "accumulation": 2}
    lengths = list(range(1, 30))
    plain = make_schedule(lengths, **settings)
    by_tokens = make_schedule(lengths, **settings, sample_flops=squares, balance="tokens")
    for item in plain.items(0):
        assert plain.shares(item) == by_tokens.shares(item)
        assert plain.cost_imbalance(item) == plain.imbalance(item)


def test_balance_changes_neither_the_batches_nor_their_order(make_schedule):
    lengths = list(range(1, 30))
    by_cost = make_schedule(lengths, shuffle=True, ranks=2, sample_flops=squares)
    by_tokens = make_schedule(lengths, shuffle=True, ranks=2, sample_flops=squares, balance="tokens")
    assert list(by_cost.items(0)) == list(by_tokens.items(0))
    assert list(map(by_cost.captures, by_cost.items(0))) == list(map(by_tokens.captures, by_tokens.items(0)))


def test_every_process_of_a_data_parallel_rank_gets_its_samples(make_schedule):
    """As the two ranks of each tensor-parallel group do."""
    schedule = make_schedule([3, 4, 5, 6], data_parallel_ranks=(0, 0, 1, 1))
    (item,) = schedule.items(0)
    assert schedule.num_shares == 2
    assert schedule.share(item, 0) == schedule.share(item, 1) != schedule.share(item, 2)
    destinations = schedule.destinations(item)
    for rank, share in enumerate(schedule.shares(item)):
        assert {destinations[sample] for part in share for sample in part} == {(2 * rank, 2 * rank + 1)}


def test_items_do_not_depend_on_the_topology(make_schedule):
    lengths = list(range(1, 30))
    one = make_schedule(lengths, shuffle=True)
    other = make_schedule(lengths, shuffle=True, ranks=4, accumulation=3, capture_tokens=50)
    assert list(one.items(0)) == list(other.items(0))


def test_capture_ids_differ_for_every_capture_of_a_run(make_schedule):
    schedule = make_schedule([7] * 10, held_out=[5] * 3, eval_every=1, epochs=4)
    ids = [schedule.request_id(item, sample) for item in schedule.items(0) for sample in item.sample_ids]
    assert len(ids) == len(set(ids))
    # The held-out set is captured anew for every evaluation.
    assert len(ids) > 4 * 10 + 3


def test_captures_stay_in_the_targets_token_budget(make_schedule):
    schedule = make_schedule([4, 9, 2, 7, 5], global_batch_tokens=100, capture_tokens=18)
    (item,) = schedule.items(0)
    batches = schedule.captures(item)
    assert sorted(sample for batch in batches for sample in batch) == [0, 1, 2, 3, 4]
    lengths = schedule.dataset.lengths
    assert all(len(batch) * max(lengths[sample] for sample in batch) <= 18 for batch in batches)


def test_denominators_count_the_masks_of_all_items(make_schedule):
    """All but the first token of a sample are supervised: of n tokens, n − 2 and n − 3 label a row."""
    schedule = make_schedule([5, 3, 2])
    draft = Eagle3Draft(Eagle3Config(num_steps=2))
    items = tuple(schedule.items(0))
    assert schedule.denominators(items, draft).tolist() == [3 + 1 + 0, 2 + 0 + 0]
    assert schedule.denominators(items * 2, draft).tolist() == [8, 4]


def test_denominators_of_an_evaluation_count_all_blocks(make_schedule):
    """A block can begin at 18 of 19 supervised tokens; a step trains seven blocks."""
    schedule = make_schedule([20], held_out=[20])
    draft = DFlashDraft(DFlashConfig(block_size=2))
    found = [(item.evaluates, schedule.denominators((item,), draft).item()) for item in schedule.items(0)]
    assert found == [(False, 7), (True, 18)]


def test_settings_come_from_the_configuration(resolved):
    config = resolved(
        "train.global_batch_tokens=64", "train.accumulation=3", "seed=9", "data.shuffle=false"
    ).config
    settings = BatchSettings.from_config(config, FsdpStrategy)
    assert (settings.global_batch_tokens, settings.accumulation, settings.seed) == (64, 3, 9)
    assert settings.balance == "cost"
    assert (settings.shuffle, settings.total_steps, settings.data_parallel_ranks) == (False, 2, (0,))
    assert settings.capture_tokens == config.engine.batch_tokens
