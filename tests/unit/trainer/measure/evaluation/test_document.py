"""Notes on two greedy texts that differ, and on too few tokens."""

import json

import pytest

from spec_core.records import AcceptanceCounters, Generation, SamplingParams
from spec_trainer.measure.evaluation.document import compare, summarise
from spec_trainer.measure.evaluation.measure import Passes
from spec_trainer.measure.evaluation.tables import benchmark_lines
from spec_trainer.measure.evaluation.workload import Workload
from spec_trainer.workers.passes import Pass


def answers(*texts, gap=1.0) -> list[Generation]:
    return [
        Generation(token_ids=text, top2_margin=() if gap is None else (gap,) * len(text)) for text in texts
    ]


def test_equal_texts():
    same = answers((1, 2), (3,))
    assert compare(same, same) == {
        "outputs_equal": True,
        "outputs_differing_share": 0.0,
        "outputs_differing_only_at_ties": True,
        "first_differences": [],
    }


@pytest.mark.parametrize(
    ("drafted", "gap", "at_ties", "position"),
    [
        (((1, 9), (3, 4)), 0.05, True, 1),
        (((1, 9), (3, 4)), 0.5, False, 1),
        (((9, 2), (3, 4)), None, None, 0),  # the engine does not tell gaps
        (((1,), (3, 4)), 0.05, False, 1),  # one just ends: no rounding explains that
        (((1, 2, 5), (3, 4)), 0.05, False, 2),
    ],
)
def test_a_difference_is_told_and_excused_only_at_a_near_tie(drafted, gap, at_ties, position):
    result = compare(answers((1, 2), (3, 4), gap=gap), answers(*drafted))
    assert result["outputs_equal"] is False
    assert result["outputs_differing_share"] == 0.5
    assert result["outputs_differing_only_at_ties"] is at_ties
    (first,) = result["first_differences"]
    assert (first["prompt"], first["position"]) == (0, position)


def test_document_is_json_whatever_differs():
    """JSON has no infinity."""
    work = Workload(prompts=[[1]], sampling=SamplingParams(max_new_tokens=4, num_draft_tokens=2))
    two, three = (Pass(answers=answers(text), seconds=1.0) for text in ((1, 2), (1, 2, 3)))
    plain = Passes(greedy=two, sampled=None, loads={2: two})
    drafted = Passes(greedy=Pass(answers=answers((1,)), seconds=0.5), sampled=None, loads={2: three})
    document = summarise(work, plain, drafted)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["first_differences"] == [{"prompt": 0, "position": 1, "top_two_gap": None}]
    (entry,) = document["throughput"]
    assert (entry["concurrency"], entry["tokens_per_s"], entry["speedup"]) == (2, 3.0, 1.5)
    assert entry["with_draft"]["inter_token_latency_ms"] is None  # the engine does not stream
    assert (document["tokens_per_s"], document["tokens_per_s_without_draft"]) == (2.0, 2.0)


def test_few_tokens_are_called_few(caplog):
    work = Workload(prompts=[[1]], sampling=SamplingParams(max_new_tokens=4, num_draft_tokens=2))
    one = Passes(greedy=Pass(answers=answers((1, 2)), seconds=1.0), sampled=None, loads={})
    summarise(work, one, one)
    assert "too few generated tokens: 2, 5000 or more are advised" in caplog.text


def drafted(*verifications, seconds=2.0, cached=0, tokens=5000) -> Pass:
    texts = [
        Generation(token_ids=(1,) * tokens, verifications=rounds, cached_tokens=cached)
        for rounds in verifications
    ]
    counters = sum((text.acceptance for text in texts), AcceptanceCounters())
    return Pass(answers=texts, seconds=seconds, counters=counters)


def summary(names, plain: Pass, with_draft: Pass) -> dict:
    work = Workload(
        prompts=[[1]] * len(plain.answers),
        benchmarks=names,
        sampling=SamplingParams(max_new_tokens=4, num_draft_tokens=2),
    )
    return summarise(
        work, Passes(greedy=plain, sampled=None, loads={}), Passes(greedy=with_draft, sampled=None, loads={})
    )


def test_acceptance_is_weighted_by_rounds_and_per_request():
    """A long answer with one token a round, and a short one with three: per request they count the same."""
    one = Pass.joined({"gsm8k": drafted((9, 0, 0)), "mbpp": drafted((0, 0, 1), (0, 0, 0), seconds=3.0)})
    document = summary(("gsm8k", "mbpp", "mbpp"), one, one)
    assert document["acceptance_length"] == pytest.approx(1 + 2 / 10)
    assert document["acceptance_length_per_request"] == pytest.approx(2)  # an answer without a round has none
    assert [row["acceptance_length"] for row in document["benchmarks"].values()] == [1, 3]
    assert document["tokens_per_s"] == 15_000 / 5
    assert document["benchmarks"]["mbpp"]["tokens_per_s"] == 10_000 / 3
    assert document["warnings"] == []
    head, *rows = benchmark_lines({"prompts": 3, **document})
    assert head.split() == [
        "benchmark", "prompts", "tokens", "tau", "tau/request", "tokens/s", "without", "speed-up",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["gsm8k", "mbpp", "total"]
    assert rows[-1].split()[1:] == ["3", "15,000", "1.200", "2.000", "3,000.0", "3,000.0", "1.00"]


def test_figures_that_are_not_valid_are_warned_of():
    few = Pass.joined({"gsm8k": drafted((1, 0), tokens=40), "mbpp": drafted((1, 0))})
    assert summary(("gsm8k", "mbpp"), few, few)["warnings"] == [
        "gsm8k: too few generated tokens: 40, 5000 or more are advised"
    ]
    (short,) = summary((), drafted((1, 0)), drafted((1, 0), seconds=0.25))["warnings"]
    assert short.startswith("a pass took 0.25 s, too short for its speed to count")
    (cached,) = summary((), drafted(()), drafted((1, 0), cached=7))["warnings"]
    assert cached.startswith("tokens of prompts from a prefix cache: 7,")
    (useless,) = summary((), drafted(()), drafted((100, 0)))["warnings"]
    assert useless.startswith("almost no guess was accepted: the draft may be of another target")
    slow, quick = (
        Pass.joined({"gsm8k": drafted((1, 0))}),
        Pass.joined({"gsm8k": drafted((1, 0), seconds=0.5)}),
    )
    (short,) = summary(("gsm8k",), slow, quick)["warnings"]
    assert short.startswith("gsm8k: a pass took 0.50 s")


def test_figures_of_every_pass_that_are_not_valid_are_warned_of():
    work = Workload(
        prompts=[[1]] * 2,
        sampling=SamplingParams(max_new_tokens=4, num_draft_tokens=2),
        other_temperature=1.0,
        concurrency=(1, 2),
    )
    good, short = drafted((1, 0), (1, 0)), drafted((1, 0), (1, 0), seconds=0.5, cached=3)
    plain = Passes(greedy=good, sampled=good, loads={1: good, 2: good})
    with_draft = Passes(greedy=good, sampled=drafted((1, 0), tokens=40), loads={1: good, 2: short})
    few, clock, waves, cached = summarise(work, plain, with_draft)["warnings"]
    assert few == "sampled: too few generated tokens: 40, 5000 or more are advised"
    assert clock.startswith("concurrency 2: a pass took 0.50 s, too short")
    assert waves.startswith("concurrency 2: too few answers: 2,")
    assert cached.startswith("tokens of prompts from a prefix cache: 6,")
