"""What an evaluation makes of an engine's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec_core import Engine
from spec_core.errors import ConfigError
from spec_core.records import AcceptanceCounters, Generation, SamplingParams
from spec_trainer.evaluate import measure
from spec_trainer.evaluation_request import EvaluationRequest

PROMPTS = [[1, 2], [3]]
COUNTERS = AcceptanceCounters(rounds=10, drafted=40, accepted=15, accepted_per_position=(8, 4, 2, 1))


class Scripted(Engine):
    """Plain answers, and answers with a draft; remembers every pass."""

    def __init__(self, plain, drafted) -> None:
        self.plain, self.drafted = plain, drafted
        self.passes: list[tuple[float, int]] = []
        self.loaded: list[Path] = []

    def generate(self, prompts, sampling):
        assert prompts == PROMPTS
        self.passes.append((sampling.temperature, sampling.num_draft_tokens))
        return self.drafted if sampling.num_draft_tokens else self.plain

    def load_draft(self, folder):
        self.loaded.append(folder)

    def acceptance(self):
        return COUNTERS

    def capture(self, requests, schema): ...
    def health(self): ...
    def close(self): ...


def answers(*texts, gap=1.0) -> list[Generation]:
    return [Generation(token_ids=text, top_two_gap=(gap,) * len(text)) for text in texts]


def test_greedy_needs_two_passes(tmp_path):
    engine = Scripted(answers((1, 2), (3,)), answers((1, 2), (3,)))
    result = measure(engine, tmp_path, PROMPTS, SamplingParams(max_new_tokens=2, num_draft_tokens=4))
    assert engine.passes == [(0.0, 0), (0.0, 4)]
    assert engine.loaded == [tmp_path]
    assert result["outputs_equal"] is True
    assert result["acceptance_length"] == 2.5
    assert result["acceptance_per_position"] == [0.8, 0.4, 0.2, 0.1]
    assert (result["rounds"], result["drafted"], result["accepted"]) == (10, 40, 15)
    assert result["generated_tokens"] == 3


def test_sampled_texts_are_compared_greedily(tmp_path):
    engine = Scripted(answers((1,), (3,)), answers((1,), (3,)))
    sampling = SamplingParams(max_new_tokens=2, num_draft_tokens=4, temperature=1.0)
    assert measure(engine, tmp_path, PROMPTS, sampling)["outputs_equal"] is True
    assert engine.passes == [(1.0, 0), (0.0, 0), (1.0, 4), (0.0, 4)]


@pytest.mark.parametrize(
    ("drafted", "gap", "at_ties"),
    [
        (((1, 9), (3, 4)), 0.05, True),
        (((1, 9), (3, 4)), 0.5, False),
        (((1,), (3, 4)), 0.05, False),  # one just ends: no rounding explains that
    ],
)
def test_a_difference_is_told_and_excused_only_at_a_near_tie(tmp_path, drafted, gap, at_ties):
    engine = Scripted(answers((1, 2), (3, 4), gap=gap), answers(*drafted))
    result = measure(engine, tmp_path, PROMPTS, SamplingParams(max_new_tokens=2, num_draft_tokens=4))
    assert result["outputs_equal"] is False
    assert result["outputs_differing_share"] == 0.5
    assert result["outputs_differing_only_at_ties"] is at_ties


def test_few_tokens_are_called_few(tmp_path, caplog):
    engine = Scripted(answers((1,), (3,)), answers((1,), (3,)))
    measure(engine, tmp_path, PROMPTS, SamplingParams(max_new_tokens=2, num_draft_tokens=4))
    assert "2 generated tokens are few, 5000 or more are advised" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_draft_tokens", 0), ("max_new_tokens", 0), ("temperature", -0.1), ("temperature", float("nan"))],
)
def test_request_out_of_range(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}="):
        EvaluationRequest(target="t", draft_model=Path("d"), prompts=Path("p"), **{name: value})
