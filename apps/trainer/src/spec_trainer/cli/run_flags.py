"""This module has the flags of commands that take a run's configuration. It imports little."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS


def _plugin(text: str, section: str) -> Parameter:
    return Parameter(help=f"{text} ({section}.name; by default {DEFAULT_PLUGINS[section]}).")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags for configuration keys. They override the file; ``section.key=value`` arguments override them."""

    config: Path | None = None
    """YAML file with the run's configuration."""
    backend: Annotated[str | None, _plugin("Hardware; a backend plugin", "backend")] = None
    draft: Annotated[str | None, _plugin("Drafting algorithm; a draft plugin", "draft")] = None
    target: str | None = None
    """Folder or hub id of the target (target)."""
    data: str | None = None
    """Training data: file, folder or hub id (data.path)."""
    engine: Annotated[str | None, _plugin("Engine that runs the target; an engine plugin", "engine")] = None
    strategy: Annotated[str | None, _plugin("How the trainer is parallel; a strategy plugin", "strategy")] = (
        None
    )
    placement: str | None = None
    """inline, colocated or disaggregated (placement.kind; by default inline, or colocated for an engine
    with processes of its own)."""
    launcher: Annotated[str | None, _plugin("Starts the processes; a launcher plugin", "launcher")] = None
    output: str | None = None
    """Run directory (output; by default runs/ and the name of the configuration or the target)."""
    resume_from: str | None = None
    """Checkpoint to resume from: latest, previous, step-N (train.resume_from; by default latest)."""
    restarts: int | None = None
    """Times to begin again at the newest checkpoint of this command after a failure (train.restarts; by
    default 0)."""

    def as_keys(self) -> dict[str, object]:
        """Return configuration key -> value of the flags that were given."""
        keys = {
            "backend.name": self.backend,
            "draft.name": self.draft,
            "target": self.target,
            "data.path": self.data,
            "engine.name": self.engine,
            "strategy.name": self.strategy,
            "placement.kind": self.placement,
            "launcher.name": self.launcher,
            "output": self.output,
            "train.resume_from": self.resume_from,
            "train.restarts": self.restarts,
        }
        return {key: value for key, value in keys.items() if value is not None}
