"""Requests for an evaluation that are accepted, and refused."""

from pathlib import Path

import pytest

from spec_core.errors import ConfigError
from spec_trainer.measure.evaluation.request import EvaluationRequest


def request(**fields):
    return EvaluationRequest(target="t", draft_model=Path("d"), prompts=Path("p"), **fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_draft_tokens", "0"),
        ("num_draft_tokens", "2,,3"),
        ("num_draft_tokens", "2,3"),
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("concurrency", "1,x"),
        ("concurrency", "0"),
        ("concurrency", "1,,2"),
        ("concurrency", "-1"),
    ],
)
def test_request_out_of_range(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}="):
        request(**{name: value})


def test_prompts_come_from_a_file_or_from_benchmarks():
    for fields in ({}, {"prompts": Path("p"), "bench": "gsm8k"}):
        with pytest.raises(ConfigError, match="needs one of --prompts FILE and --bench NAMES"):
            EvaluationRequest(target="t", draft_model=Path("d"), **fields)
    with pytest.raises(ConfigError, match="--bench-data=f is for --bench"):
        request(bench_data=Path("f"))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "--breakdown needs --target, and one of --draft-model FOLDER and --draft NAME"),
        ({"draft": "eagle3", "draft_model": Path("d")}, "one of --draft-model FOLDER and --draft NAME"),
        ({"draft": "eagle3", "prompts": None, "bench": "gsm8k"}, "--breakdown needs --prompts FILE"),
        ({"draft": "eagle3", "untrained": True}, "--untrained is not for --breakdown"),
        ({"draft": "eagle3", "by_length": True}, "--by-length is not for --breakdown"),
        ({"draft": "eagle3", "report": Path("r")}, "--report is not for --breakdown"),
        ({"draft": "eagle3", "num_draft_tokens": "1,2", "concurrency": "1"}, "--breakdown takes one number"),
        ({"draft": "eagle3", "breakdown": False}, "--draft='eagle3' is for --breakdown"),
        ({"server": "http://a:1", "target": ""}, "--breakdown is not for --server"),
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
