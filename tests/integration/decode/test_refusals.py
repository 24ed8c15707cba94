"""Settings that do not go with decoding are refused in one line."""

from dataclasses import replace

import pytest

from spec_draft_eagle3.draft import Eagle3Draft
from spec_engine_hf.engine import HfEngine
from spec_engine_sglang.engine import SglangEngine

from .conftest import CHAIN

MEASURES = "decode.every=0 train.push_every=0 train.serve_every=10"
"""Words of a run that decodes nothing but to measure its draft."""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "train.push_every=15",
            "train.push_every=15 with decode.every=10: the engine decodes between cycles",
        ),
        ("push.to=[http://127.0.0.1:1]", "decode.every=10 with push.to=http://127.0.0.1:1"),
        ("push.canary_margin=0.1", "decode.every=10 with push.canary_margin=0.1"),
        ("data.features=features", "decode.every=10 with data.features"),
        ("decode.max_new_tokens=5000", "decode.max_new_tokens=5000 leaves no room for a prompt"),
        ("placement.window_bytes=1000", "placement.window_bytes=1000 is smaller than a prompt"),
        ("draft.name=dflash decode.num_draft_tokens=16", "draft 'dflash' guesses 15 tokens a round"),
        (
            f"{MEASURES} decode.every=10",
            "train.serve_every=10 with decode.every=10: its cycles measure the draft",
        ),
        (
            f"{MEASURES} decode.on_policy=true",
            "decode.on_policy=True without decode.every: its answers are not",
        ),
        (
            f"{MEASURES} push.to=[http://127.0.0.1:1] train.push_every=5",
            "train.serve_every=10 with push.to=http",
        ),
        (f"{MEASURES} data.eval_samples=0", "train.serve_every=10, but nothing is held out"),
    ],
)
def test_what_does_not_go_with_decoding_is_refused_in_one_line(command_line, untrained, words, line):
    """``unit/trainer/plan/test_combinations.py`` has the others."""
    _, *keys = untrained.words(untrained.folder / "refused")
    assert line in command_line("plan", *keys, *words.split()).error


def test_a_plugin_that_cannot_is_refused_in_one_line(command_line, untrained, monkeypatch):
    """``unit/trainer/plan/test_combinations.py`` has what else a plugin cannot do."""
    monkeypatch.setattr(Eagle3Draft, "learns_from_guesses", False)
    _, *keys = untrained.words(untrained.folder / "refused", decode__on_policy=True)
    assert "draft.name=eagle3: this draft does not learn" in command_line("plan", *keys).error


def test_answers_without_guess_depths_end_a_run_on_policy_in_one_line(command_line, untrained, monkeypatch):
    """An engine that can report them may be set so that it cannot: vLLM's adaptive verification is such a setting."""
    generate = HfEngine.generate
    monkeypatch.setattr(
        HfEngine, "generate", lambda *asked: [replace(answer, guess_depths=()) for answer in generate(*asked)]
    )
    output = untrained.folder / "without"
    few = {"decode__prompts": 2, "decode__max_new_tokens": 4, "data__eval_samples": 0, **CHAIN}
    outcome = command_line(*untrained.words(output, decode__on_policy=True, **few))
    assert "engine 'hf' did not say which guesses it judged" in outcome.error
    assert not (output / "decoded" / "cycle-0.jsonl").exists()


def test_a_draft_that_the_engine_does_not_serve_is_refused_in_one_line(command_line, untrained, monkeypatch):
    """SGLang is not installed here, so it lends its answer to the engine that is."""
    monkeypatch.setattr(HfEngine, "check_method", SglangEngine.check_method)
    one, two = (
        untrained.words(untrained.folder / "refused", draft__num_layers=layers)[1:] for layers in (1, 2)
    )
    assert command_line("plan", *one).code == 0
    line = "engine.name=sglang: it does not serve draft 'eagle3' with these options; its serving_methods name vllm"
    assert command_line("plan", *two).error.endswith(line)
