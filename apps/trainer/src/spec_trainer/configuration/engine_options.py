"""Read the options of a command that needs an engine and no trainer: flags and ``section.key=value``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import Field

from spec_core import Backend, BackendConfig, Config, Engine, EngineConfig
from spec_core.errors import ConfigError
from spec_core.validation import validate
from spec_trainer.configuration import read_configuration
from spec_trainer.configuration.chat import PromptConfig
from spec_trainer.configuration.plugin_names import named_plugin
from spec_trainer.configuration.run import TimeoutsConfig

B = TypeVar("B", bound=BackendConfig)
E = TypeVar("E", bound=EngineConfig)


class EngineSection(Config, Generic[E]):
    """The configuration of a command that needs only an engine's options, and not the engine."""

    engine: E


class EngineSections(Config, Generic[B, E]):
    """The configuration sections of a command without trainer; ``data`` only says how prompts become text."""

    backend: B = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    engine: E = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    timeouts: TimeoutsConfig = TimeoutsConfig()
    data: PromptConfig = PromptConfig()


@dataclass(frozen=True)
class EngineOptions:
    """The sections and plugins from which ``create_engine`` makes an engine for a command without a run."""

    config: EngineSections[BackendConfig, EngineConfig]
    backend: Backend
    engine_type: type[Engine]


def read_engine_section(engine_type: type[Engine], words: Sequence[str]) -> EngineConfig:
    """Read the section ``engine`` of a plugin from ``engine.key=value`` arguments; its program need not be installed.

    Raise UsageError, with a message of one line, if an option is wrong.
    """
    values = read_configuration(None, {"engine.name": engine_type.name}, words)
    model = EngineSection[engine_type.Config]  # type: ignore[name-defined]
    return validate(model, values, "options").engine


def read_engine_options(engine: str, backend: str, words: Sequence[str]) -> EngineOptions:
    """Read the options of a command from plugin names and ``section.key=value`` arguments (``words``).

    Nothing is started. Raise UsageError, with a message of one line, if an option is wrong.
    """
    values = read_configuration(None, {"backend.name": backend, "engine.name": engine}, words)
    backend_type, engine_type = named_plugin(Backend, values), named_plugin(Engine, values)
    model = EngineSections[backend_type.Config, engine_type.Config]  # type: ignore[name-defined]
    config = validate(model, values, "options")
    if config.engine.replicas != 1:
        raise ConfigError(
            f"engine.replicas={config.engine.replicas}: this command starts one engine; remove it, and run a "
            "command on each device (regenerate --part=I/N divides the prompts)"
        )
    return EngineOptions(config, backend_type(config.backend), engine_type)
