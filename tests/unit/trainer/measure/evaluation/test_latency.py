"""Times of tokens, and what is made of them."""

import numpy as np
import pytest

from spec_core.records import Generation
from spec_trainer.measure.evaluation.latency import AnswerTimes, break_even, describe_load, describe_times
from spec_trainer.workers.passes import Pass


def answer(*times: float) -> Generation:
    return Generation(token_ids=(1,) * len(times), times_s=times)


def test_latencies_of_a_load():
    """The first answer gets two tokens at once; per token it waits 50 ms, between parts 100."""
    one = Pass(answers=[answer(0.1, 0.2, 0.2, 0.3, 0.3), answer(0.3, 0.4)], seconds=0.5)
    figures = describe_load(one)
    assert figures["tokens_per_s"] == pytest.approx(14)
    assert figures["tokens_per_s_per_user"] == pytest.approx((20 + 10) / 2)
    assert figures["time_to_first_token_ms"]["mean"] == pytest.approx(200)
    assert figures["inter_token_latency_ms"]["mean"] == pytest.approx((50 + 100) / 2)
    assert figures["inter_token_latency_ms"]["p99"] == pytest.approx(99.5)
    assert figures["time_between_parts_ms"]["mean"] == pytest.approx(100)


def test_answers_of_one_part_have_no_time_between_tokens():
    figures = describe_load(Pass(answers=[answer(0.1), answer(0.2, 0.2)], seconds=0.5))
    assert (figures["inter_token_latency_ms"]["mean"], figures["tokens_per_s_per_user"]) == (0, None)
    assert (figures["time_between_parts_ms"], figures["time_to_first_token_ms"]["p50"]) == (None, 150)


def test_percentiles_are_those_of_numpy():
    draw = np.random.default_rng(0)
    firsts, lasts = draw.exponential(0.2, 37), draw.exponential(3.0, 37)
    timed = [
        AnswerTimes(num_tokens=11, parts_s=(first, first + last / 2, first + last))
        for first, last in zip(firsts, lasts, strict=True)
    ]
    figures = describe_times(timed)
    for key, seconds in (("time_to_first_token_ms", firsts), ("inter_token_latency_ms", lasts / 10)):
        expected = {"mean": seconds.mean(), "p50": np.median(seconds), "p99": np.percentile(seconds, 99)}
        assert figures[key] == pytest.approx({name: 1e3 * value for name, value in expected.items()})
    assert figures["tokens_per_s_per_user"] == pytest.approx((10 / lasts).mean())


@pytest.mark.parametrize(
    ("speedups", "border"),
    [
        ({1: 2.0, 4: 1.5}, None),
        ({1: 0.9, 4: 0.8}, 1.0),
        ({4: 1.5, 16: 0.5, 1: 2.0}, 8.0),  # half way, by the logarithm
        ({1: 0.9, 2: 1.1, 8: 0.9}, 4.0),  # noise at the beginning is no border
        ({}, None),
    ],
)
def test_the_draft_pays_up_to_a_border(speedups, border):
    entries = [{"concurrency": size, "speedup": speedup} for size, speedup in speedups.items()]
    assert break_even(entries) == (None if border is None else pytest.approx(border))
