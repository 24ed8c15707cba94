"""The run's configuration: defaults in one place, plugins' own sections, a file that gives the same run back."""

from pathlib import Path

import pytest
import yaml

from spec_core import BackendConfig, Config, EngineConfig, StrategyConfig
from spec_core.errors import ConfigError
from spec_core.validation import validate
from spec_draft_eagle3.config import Eagle3Config
from spec_engine_hf.engine import HfConfig
from spec_optimizers.adamw import AdamWConfig
from spec_trainer.configuration import dump_yaml
from spec_trainer.configuration.data import DataConfig
from spec_trainer.configuration.run import AnyRunConfig, run_config_type

LEAST = {"target": "t", "output": "o", "data": {"path": "d"}}

RunConfig = run_config_type(BackendConfig, Eagle3Config, StrategyConfig, HfConfig, optimizer=AdamWConfig)


def test_sections_of_plugins_have_the_plugins_own_keys():
    config = validate(
        RunConfig, {**LEAST, "engine": {"dtype": "bfloat16"}, "draft": {"num_steps": 3}}, "test"
    )
    assert isinstance(config.engine, HfConfig)
    assert isinstance(config.draft, Eagle3Config)
    with pytest.raises(ConfigError, match=r"unknown key 'engine.dtype'"):
        validate(AnyRunConfig, {**LEAST, "engine": {"dtype": "bfloat16"}}, "test")


def test_file_gives_an_equal_configuration_back():
    values = {
        **LEAST,
        "train": {"lr": 1e-4},
        "optimizer": {"betas": [0.8, 0.9]},
        "profile": {"steps": [3]},
        "draft": {"layers": [1, 4]},
    }
    config = validate(RunConfig, values, "test")
    assert validate(RunConfig, yaml.safe_load(dump_yaml(config)), "test") == config


def test_configuration_can_be_built_in_code():
    config = AnyRunConfig(target="t", output=Path("o"), data=DataConfig(path="d"))
    assert (config.engine, config.backend) == (EngineConfig(), BackendConfig())
    assert isinstance(config.train, Config)
