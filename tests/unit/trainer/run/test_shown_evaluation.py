"""Lines that show what an evaluation has measured."""

import pytest

from spec_core import Draft, plugins
from spec_trainer.measure.evaluation.tables import evaluation_lines
from spec_trainer.run.serving import closing_lines


def draft(name, **options):
    plugin = plugins.load(Draft, name)
    return plugin(plugin.Config(name=name, **options))


@pytest.mark.parametrize(
    ("figures", "lines"),
    [
        (
            {"acceptance_length": 2.838, "eval_acceptance_length": 3.0, "speedup": 1.731, "engine": "vllm"},
            ["acceptance length (tau): 2.84 tokens a pass, measured", "speed-up: 1.73 times in engine vllm"],
        ),
        (
            {"acceptance_length": None, "eval_acceptance_length": 2.5},
            [
                "acceptance length (tau): 2.50 tokens a pass, simulated on held-out data; "
                "spec-trainer evaluate measures it"
            ],
        ),
        ({}, ["acceptance length (tau): not known; spec-trainer evaluate measures it"]),
    ],
)
def test_a_simulated_acceptance_length_is_never_called_measured(figures, lines):
    closing = closing_lines({**figures, "serve": {"vllm": "vllm serve x"}})
    assert list(closing) == [*lines, "serve it with vllm:\n  vllm serve x"]


def test_a_draft_that_no_engine_here_serves_is_said_to_be_so():
    *_, last = closing_lines({"serve": {}})
    assert last.startswith("no engine that has a plugin here serves this draft")


def figures(temperature, tau):
    return {
        "temperature": temperature, "acceptance_length": tau, "acceptance_length_per_request": None,
        "acceptance_per_position": [0.8, 0.51], "generated_tokens": 12345, "tokens_per_s": 200.0,
        "tokens_per_s_without_draft": 100.0, "speedup": 2.0,
    }  # fmt: skip


def test_an_evaluation_is_shown_as_tables():
    document = {
        "target": "t",
        "draft": "d",
        "engine": "vllm",
        "engine_versions": {"vllm": "0.33.0"},
        "backend": "cuda",
        "prompts": 32,
        "num_draft_tokens": 2,
        "acceptance_length_before": 1.01,
        **figures(0.0, 2.3),
        "greedy": figures(0.0, 2.3),
        "sampled": figures(0.7, 2.1),
        "inputs": {},
        "benchmarks": {},
        "throughput": [],
        "sweep": None,
        "warnings": ["few tokens"],
        "outputs_equal": False,
        "outputs_differing_share": 0.25,
        "outputs_differing_only_at_ties": True,
        "serve": {"vllm": "vllm serve t"},
    }
    lines = list(evaluation_lines(document))
    assert lines[:4] == [
        "target: t",
        "draft: d",
        "engine: vllm (vllm 0.33.0), backend cuda",
        "prompts: 32, draft tokens: 2",
    ]
    rows = {line[:20].strip(): line[20:].split() for line in lines[6:9]}
    assert rows == {
        "greedy": ["12,345", "2.300", "200.0", "100.0", "2.00", "0.80", "0.51"],
        "sampled, T=0.7": ["12,345", "2.100", "200.0", "100.0", "2.00", "0.80", "0.51"],
        "an untrained draft": ["1.010"],
    }
    assert lines[10:] == [
        "25 % of the greedy texts differ, each first at a near tie of two tokens, which is rounding",
        "warning: few tokens",
        "acceptance length (tau): 2.30 tokens a pass, measured",
        "speed-up: 2.00 times in engine vllm",
        "serve it with vllm:\n  vllm serve t",
    ]


def test_a_draft_that_makes_decoding_slower_is_said_to_do_so_before_its_command():
    slower = {"acceptance_length": 1.3, "speedup": 0.366, "engine": "hf", "serve": {"vllm": "vllm serve t"}}
    assert list(closing_lines(slower))[1:3] == [
        "speed-up: 0.37 times in engine hf",
        "this draft makes decoding slower here; docs/serve.md says when not to use a draft, and "
        "docs/troubleshooting.md what raises its acceptance length",
    ]
