"""This module has the flags of commands that take a run's configuration. It imports little."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS


def _default(section: str) -> str:
    return f"; by default {DEFAULT_PLUGINS[section]}"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags for configuration keys. They override the file; ``section.key=value`` arguments override them."""

    config: Path | None = None
    """YAML file with the run's configuration."""
    backend: Annotated[
        str | None, Parameter(help="Hardware; a backend plugin (backend.name" + _default("backend") + ").")
    ] = None
    draft: Annotated[
        str | None,
        Parameter(help="Drafting algorithm; a draft plugin (draft.name" + _default("draft") + ")."),
    ] = None
    target: Annotated[str | None, Parameter(help="Folder or hub id of the target (target).")] = None
    data: Annotated[str | None, Parameter(help="Training data: file, folder or hub id (data.path).")] = None
    engine: Annotated[
        str | None,
        Parameter(
            help="Engine that runs the target; an engine plugin (engine.name" + _default("engine") + ")."
        ),
    ] = None
    strategy: Annotated[
        str | None,
        Parameter(
            help="How the trainer is parallel; a strategy plugin (strategy.name" + _default("strategy") + ")."
        ),
    ] = None
    placement: Annotated[
        str | None,
        Parameter(
            help="inline, colocated or disaggregated (placement.kind; by default inline, "
            "or colocated for an engine with processes of its own)."
        ),
    ] = None
    launcher: Annotated[
        str | None,
        Parameter(
            help="Starts the processes; a launcher plugin (launcher.name" + _default("launcher") + ")."
        ),
    ] = None
    output: Annotated[
        str | None,
        Parameter(
            help="Run directory (output; by default runs/ and the name of the configuration or the target)."
        ),
    ] = None
    resume_from: Annotated[
        str | None,
        Parameter(
            help="Checkpoint to resume from: latest, previous, step-N (train.resume_from; by default latest)."
        ),
    ] = None
    restarts: Annotated[
        int | None,
        Parameter(
            help="Times to begin again at the newest checkpoint of this command after a failure "
            "(train.restarts; by default 0)."
        ),
    ] = None

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
