"""Combinations of settings: each is refused by its line, and a configuration that shows none passes."""

import re
from types import SimpleNamespace

import pytest

from spec_core import BackendConfig, EngineAbilities, StrategyConfig
from spec_core.errors import ConfigError
from spec_core.records import Capabilities
from spec_core.validation import validate
from spec_draft_eagle3.config import Eagle3Config
from spec_engine_hf.engine import HfConfig
from spec_optimizers.adamw import AdamWConfig
from spec_trainer.configuration.run import run_config_type
from spec_trainer.plan import combinations
from spec_trainer.plan.combinations import refuse

RunConfig = run_config_type(BackendConfig, Eagle3Config, StrategyConfig, HfConfig, optimizer=AdamWConfig)
LEAST = {"target": "t", "output": "o", "data": {"path": "d"}}
FOLLOWS = {"train": {"schedule": "constant"}, "follow": {"servers": ["http://a:1"]}}


def config(**sections):
    return validate(RunConfig, LEAST | sections, "test")


@pytest.mark.parametrize(
    "sections",
    [
        {"placement": {"kind": "colocated", "trainer_fraction": 0.6, "engine_fraction": 0.4}},
        {"train": {"schedule": "wsd", "decay_share": 0.5, "min_lr_ratio": 0.1}},
        {"train": {"epochs": 3}},
        {"decode": {"every": 5}, "train": {"push_every": 10}},
        {
            "train": {"push_every": 5},
            "push": {"to": ["http://a:1"], "canary_margin": 0.1, "canary_rounds": 9},
        },
    ],
)
def test_what_goes_together_passes(sections):
    refuse(combinations.KEYS, config(**sections))


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_defaults_written_out_are_no_combination(schedule):
    """The resolved file writes every key; a default there is nobody's choice."""
    begun = config(train={"schedule": schedule, "steps": 3})
    written = validate(RunConfig, begun.model_dump(mode="json"), "test")
    assert written == begun
    refuse(combinations.KEYS, written)


INLINE = "an inline engine lives in the one trainer process"
READ = "features are read from a folder, and no engine starts"
REFUSED = {
    f"engine.replicas=2 with inline: {INLINE}; set placement.kind=disaggregated or engine.replicas=1": {
        "engine": {"replicas": 2}
    },
    f"train.ranks=2 with inline: {INLINE}; set placement.kind=colocated or disaggregated, or train.ranks=1": {
        "train": {"ranks": 2}
    },
    f"engine.tensor_parallel=2 with inline: {INLINE}; set engine.tensor_parallel=1 or another placement": {
        "engine": {"tensor_parallel": 2}
    },
    f"decode.replicas=2 with inline: {INLINE}; set placement.kind=disaggregated or decode.replicas=1": {
        "decode": {"every": 5, "replicas": 2}
    },
    "train.restarts=1 with inline: there is no second process that could restart it; remove it or set another": {
        "train": {"restarts": 1}
    },
    "placement.engine_fraction=0.5 with inline: only colocated processes share a device; remove it or set "
    "placement.kind=colocated": {"placement": {"engine_fraction": 0.5}},
    "placement.trainer_fraction=0.6 with placement.engine_fraction=0.7: together they exceed the device; "
    "their sum must be <= 1": {
        "placement": {"kind": "colocated", "trainer_fraction": 0.6, "engine_fraction": 0.7}
    },
    "train.steps=3 and train.epochs=2: both say how long; remove one": {"train": {"steps": 3, "epochs": 2}},
    "push.to=http://a:1,http://b:1 with train.push_every=0: nothing is pushed; set train.push_every or remove it": {
        "push": {"to": ["http://a:1", "http://b:1"]}
    },
    "data.eval_path=y with data.eval_samples=3: both say what is held out; remove one": {
        "data": {"eval_path": "y", "eval_samples": 3}
    },
    f"engine.replicas=2 with data.features: {READ}; remove one": {
        "data": {"features": "f"},
        "engine": {"replicas": 2},
    },
    "draft.opd=True without decode.on_policy: no guess was judged; set decode.on_policy=true or remove it": {
        "decode": {"every": 5},
        "draft": {"opd": True},
    },
    "decode.prompts=16 without decode.every: nothing is decoded; set decode.every or remove it": {
        "decode": {"prompts": 16}
    },
    f"train.serve_every=5 with data.features: {READ}; remove one": {
        "data": {"features": "f"},
        "train": {"serve_every": 5},
    },
}


@pytest.mark.parametrize(("line", "sections"), REFUSED.items())
def test_what_does_not_go_together_is_refused_with_the_values(line, sections):
    with pytest.raises(ConfigError) as caught:
        refuse(combinations.KEYS, config(**sections))
    assert str(caught.value).startswith(line.replace("with inline", "with placement.kind=inline"))


def test_an_engine_with_processes_of_its_own_is_not_inline():
    outside = SimpleNamespace(abilities=EngineAbilities(in_process=False))
    with pytest.raises(ConfigError, match=r"with engine.name=\w+: this engine runs in"):
        refuse(combinations.ENGINE, config(engine={"name": "hf"}), outside)
    refuse(combinations.ENGINE, config(placement={"kind": "colocated"}), outside)


def test_follow_takes_what_training_refuses_and_the_reverse():
    following = config(**FOLLOWS)
    refuse(combinations.FOLLOW, following)
    with pytest.raises(ConfigError, match=r"follow.servers=http://a:1: only spec-trainer follow"):
        refuse(combinations.WITHOUT_FOLLOW, following)
    refuse(combinations.WITHOUT_FOLLOW, config())
    with pytest.raises(ConfigError, match=r"follow without follow.servers"):
        refuse(combinations.FOLLOW, config(train={"schedule": "constant"}))
    serve = {"servers": ["http://a:1"], "serve": {"arguments": "--seed 1"}}
    without_engine = config(train={"schedule": "constant"}, follow=serve)
    with pytest.raises(ConfigError, match=r"follow.serve.arguments=--seed 1 without follow.serve.engine"):
        refuse(combinations.FOLLOW, without_engine)


@pytest.mark.parametrize(
    ("sections", "able", "line"),
    [
        (
            {"train": {"fp8": "frozen", "dtype": "bfloat16"}},
            {"fp8": False},
            "with backend.name=cpu: this backend",
        ),
        (
            {"train": {"fp8": "frozen", "dtype": "bfloat16"}},
            {"takes_fp8": False},
            "with strategy.name=fsdp: this",
        ),
        (
            {"train": {"fp8": "frozen", "dtype": "float32"}},
            {},
            "with train.dtype=float32: what is not in fp8",
        ),
        (
            {"decode": {"every": 5, "on_policy": True}},
            {"learns": False},
            "this draft does not learn from judged",
        ),
        (
            {"decode": {"every": 5, "on_policy": True}},
            {"depths": False},
            "this engine does not say which guesses",
        ),
        ({"decode": {"every": 5}, "train": {"push_every": 5}}, {"fresh": False}, "takes no fresh weights"),
    ],
)
def test_what_a_plugin_cannot_do_is_refused(sections, able, line):
    given = {"fp8": True, "takes_fp8": True, "learns": True, "depths": True, "fresh": True}
    can = SimpleNamespace(**given | able)
    abilities = EngineAbilities(in_process=True, guess_depths=can.depths, fresh_weights=can.fresh)
    parts = SimpleNamespace(
        draft=SimpleNamespace(learns_from_guesses=can.learns),
        engine_type=SimpleNamespace(abilities=abilities),
        backend=SimpleNamespace(capabilities=lambda: Capabilities(fp8=can.fp8)),
        strategy_type=SimpleNamespace(takes_fp8=can.takes_fp8),
    )
    named = {"backend": {"name": "cpu"}, "strategy": {"name": "fsdp"}} | sections
    with pytest.raises(ConfigError) as caught:
        refuse(combinations.PARTS, config(**named), parts)
    assert line in str(caught.value)


def test_settings_without_a_condition_of_their_own_are_nothing_but_keys():
    """Such a text is the condition, so a word that is no key would be ignored, or refuse every run."""
    tables = [getattr(combinations, name) for name in combinations.__all__ if name.isupper()]
    read = [one.settings for table in tables for one in table if one.refused is None]
    key = r"(without )?([a-z_]+(\.[a-z_]+)+|--[a-z-]+)(=\S+)?"
    for settings in read:
        assert re.fullmatch(rf"{key}(( with| and)? ({key}|follow|capture))*", settings), settings
