"""The hours of a run: a bound by its arithmetic before it starts, its own pace afterwards."""

import json

import pytest

from spec_trainer.plan.expected_time import expected_time


def flops(found: dict) -> float:
    return float(found["rests_on"].split()[0])


def test_before_it_starts_it_is_a_bound_and_says_what_it_rests_on(resolved):
    run = resolved("train.steps=3")
    found = expected_time(run)
    assert found.keys() == {"hours_at_least", "rests_on"}
    # Eight Llama layers of width 32 and the draft's, by hand: q, k, v, o and the three of the feed-forward.
    target, head_dim = run.target, run.target.head_dim
    attention = 2 * 32 * head_dim * (target.num_heads + target.num_kv_heads)
    layer = attention + 3 * 32 * target.intermediate_size
    tokens = 3 * run.dataset.total_tokens  # an epoch is one step here
    assert flops(found) >= 2 * 8 * layer * tokens * 0.99
    assert flops(expected_time(resolved("train.steps=6"))) == pytest.approx(2 * flops(found), rel=0.02)


def test_it_counts_the_drafts_head_in_each_of_its_steps(resolved):
    """The head of a small target's draft is most of its weights, and each step of the draft computes it anew."""
    run = resolved("train.steps=3")
    head, layers = run.target.vocab_size * run.target.hidden_size, 2 * 32**2
    supervised = 3 * sum(int(sample.loss_mask.sum()) for sample in run.dataset.train)
    steps_7, steps_3 = (
        flops(expected_time(resolved("train.steps=3", f"draft.num_steps={n}"))) for n in (7, 3)
    )
    assert steps_7 - steps_3 >= 4 * 6 * (head + layers) * supervised * 0.99
    few = flops(expected_time(resolved("train.steps=3", "draft.num_steps=7", "draft.vocab_size=8")))
    assert few == pytest.approx(steps_7 - 7 * 6 * (head - 8 * run.target.hidden_size) * supervised, rel=0.1)


def test_a_run_that_is_resumed_has_its_own_pace(resolved, tmp_path):
    run = resolved("train.steps=100")
    run.directory.root.mkdir()
    (run.directory.root / ".identity").write_text(run.identity + "\n")
    rows = [
        {"step": step, "loss": 1.0, "time_data_s": 1.0, "time_step_s": 35.0 if step > 1 else 900.0}
        for step in range(1, 11)
    ]
    run.directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert expected_time(run) == {
        "hours": 0.9,
        "rests_on": "the median of the last 10 steps of this run, 36.00 s; steps left: 90",
    }


def test_nothing_is_promised_where_the_answers_are_not_known(resolved):
    found = expected_time(resolved("decode.every=1", "decode.prompts=5", "decode.max_new_tokens=8"))
    assert found.keys() == {"rests_on"}
