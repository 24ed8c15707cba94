"""Engine, backend and timeouts of a command that needs an engine and no trainer: flags and ``section.key=value``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import Field

from spec_core import Backend, BackendConfig, Config, Engine, EngineConfig, plugins
from spec_core.config import read_configuration, validate
from spec_core.engine import EngineContext
from spec_core.errors import ConfigError
from spec_trainer.config import TimeoutsConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core import TargetSpec

B = TypeVar("B", bound=BackendConfig)
E = TypeVar("E", bound=EngineConfig)


class EngineSections(Config, Generic[B, E]):
    backend: B = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    engine: E = Field(default_factory=dict, validate_default=True)  # type: ignore[assignment]
    timeouts: TimeoutsConfig = TimeoutsConfig()


@dataclass(frozen=True)
class EngineOptions:
    sections: EngineSections[BackendConfig, EngineConfig]
    backend: Backend
    engine_type: type[Engine]

    def create_engine(self, target: TargetSpec) -> Engine:
        """Return an engine that generates, and captures nothing."""
        timeouts = self.sections.timeouts
        context = EngineContext(backend=self.backend, start_s=timeouts.start_s, peer_s=timeouts.peer_s)
        return self.engine_type.create(self.sections.engine, target, context)


def read_engine_options(engine: str, backend: str, words: Sequence[str]) -> EngineOptions:
    """Raises a UsageError, one line, for anything that is wrong; starts nothing."""
    values = read_configuration(None, {"backend.name": backend, "engine.name": engine}, words)
    backend_type = plugins.load_available(Backend, _name(values, "backend"))
    engine_type = plugins.load_available(Engine, _name(values, "engine"))
    model = EngineSections[backend_type.Config, engine_type.Config]  # type: ignore[name-defined]
    sections = validate(model, values, "options")
    return EngineOptions(sections, backend_type(sections.backend), engine_type)


def _name(values: dict[str, Any], section: str) -> str:
    given = values[section]
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str):
        raise ConfigError(f"{section}={given!r}: expected a section with the name of a {section} plugin")
    return name
