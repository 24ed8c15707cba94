"""What is made of two greedy texts, and of too few tokens."""

from __future__ import annotations

import json

import pytest

from spec_core.records import Generation, SamplingParams
from spec_trainer.evaluation.document import compare, summarise
from spec_trainer.evaluation.measure import Pass, Passes
from spec_trainer.evaluation.workload import Workload


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
    plain = Passes(greedy=Pass(answers=answers((1, 2)), seconds=1.0), sampled=None, tokens_per_s={2: 1.0})
    drafted = Passes(greedy=Pass(answers=answers((1,)), seconds=0.5), sampled=None, tokens_per_s={2: 3.0})
    document = summarise(work, plain, drafted)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["first_differences"] == [{"prompt": 0, "position": 1, "top_two_gap": None}]
    assert document["throughput"] == [
        {"concurrency": 2, "tokens_per_s": 3.0, "tokens_per_s_without_draft": 1.0, "speedup": 3.0}
    ]
    assert (document["tokens_per_s"], document["tokens_per_s_without_draft"]) == (2.0, 2.0)


def test_few_tokens_are_called_few(caplog):
    work = Workload(prompts=[[1]], sampling=SamplingParams(max_new_tokens=4, num_draft_tokens=2))
    one = Passes(greedy=Pass(answers=answers((1, 2)), seconds=1.0), sampled=None, tokens_per_s={})
    summarise(work, one, one)
    assert "2 generated tokens are few, 5000 or more are advised" in caplog.text
