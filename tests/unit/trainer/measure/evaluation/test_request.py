"""Requests for an evaluation that are accepted, and refused."""

from pathlib import Path

import pytest

from spec_core.errors import ConfigError
from spec_trainer.measure.evaluation.request import EvaluationRequest


def request(**fields):
    return EvaluationRequest(target="t", draft_model=Path("d"), prompts=Path("p"), **fields)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("num_draft_tokens", "0", "=0: expected positive integers below 100000, such as 3 or 1,2,3,5"),
        ("num_draft_tokens", "2,,3", "=2,,3: expected positive integers"),
        ("num_draft_tokens", "2,3", "=2,3 without --concurrency: they are compared at each concurrency; add"),
        ("max_new_tokens", 0, "=0: expected 1 or more"),
        ("temperature", -0.1, "=-0.1: expected 0 or more"),
        ("concurrency", "1,x", "=1,x: expected positive integers below 100000, such as 1,8,32"),
        ("concurrency", "0", "=0: expected positive"),
        ("concurrency", "-1", "=-1: expected positive"),
        ("concurrency", "9" * 5_000, ": expected positive integers below 100000, such as 1,8,32"),
        ("seed", 10**21, "=1000000000000000000000: expected an integer of at most 64 bits"),
    ],
)
def test_request_out_of_range(name, value, problem):
    with pytest.raises(ConfigError) as refused:
        request(**{name: value})
    assert f"--{name.replace('_', '-')}=" in str(refused.value)
    assert problem in str(refused.value)
    assert len(str(refused.value)) < 1_000


def test_prompts_come_from_a_file_or_from_benchmarks():
    with pytest.raises(ConfigError, match="evaluate without --prompts and --bench: nothing says what to ask"):
        EvaluationRequest(target="t", draft_model=Path("d"))
    with pytest.raises(ConfigError, match="--prompts=p with --bench=gsm8k: both name the prompts"):
        request(bench="gsm8k")
    with pytest.raises(ConfigError, match="--bench-data=f without --bench: it holds the rows of benchmarks"):
        request(bench_data=Path("f"))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "--breakdown without one of --draft-model and --draft: it measures one draft"),
        ({"draft": "eagle3", "draft_model": Path("d")}, "one of --draft-model and --draft: it measures one"),
        (
            {"draft": "eagle3", "prompts": None, "bench": "gsm8k"},
            "--bench=gsm8k with --breakdown: it takes prompts from a file",
        ),
        ({"draft": "eagle3", "untrained": True}, "--untrained with --breakdown: it decodes greedily"),
        ({"draft": "eagle3", "by_length": True}, "--by-length with --breakdown"),
        ({"draft": "eagle3", "report": Path("r")}, "--report=r with --breakdown"),
        (
            {"draft": "eagle3", "num_draft_tokens": "1,2", "concurrency": "1"},
            "--num-draft-tokens=1,2 with --breakdown: it takes one",
        ),
        ({"draft": "eagle3", "breakdown": False}, "--draft=eagle3 without --breakdown: only a breakdown"),
        ({"draft": "eagle3", "target": ""}, "--breakdown without --target"),
        ({"server": "http://a:1", "target": ""}, "--breakdown with --server: a server runs"),
    ],
)
def test_a_breakdown_is_of_one_draft_or_one_kind_of_draft(fields, problem):
    with pytest.raises(ConfigError, match=problem):
        EvaluationRequest(**{"target": "t", "prompts": Path("p"), "breakdown": True} | fields)


def test_concurrencies_and_draft_tokens_are_lists_without_repetitions():
    asked = request(concurrency="8, 1,32,8", num_draft_tokens="3,1, 3")
    assert (asked.concurrencies, asked.draft_token_counts) == ((8, 1, 32), (3, 1))
    assert (request().concurrencies, request().draft_token_counts) == ((), ())
    assert request(num_draft_tokens="5").draft_token_counts == (5,)
