"""Build shell commands that serve a draft, and the last lines of commands that train or measure it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from spec_core.engine import Engine
from spec_core.errors import PluginError, SpecError
from spec_core.foreign import foreign_errors
from spec_core.plugins import find, installed, load_each

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from spec_core.draft import Draft
    from spec_core.target import TargetSpec

log = logging.getLogger(__name__)


def serving_engines(draft: Draft) -> list[str]:
    """Return the names of the engines that serve the draft and whose plugins are installed."""
    return [record.name for record in installed(Engine) if record.name in draft.serving_methods]


def unserved_warning(draft: Draft) -> str | None:
    """Return a warning if no engine that has a plugin here serves the draft, else None."""
    if serving_engines(draft):
        return None
    others = ", ".join(sorted(draft.serving_methods)) or "no engine"
    return f"no engine that has a plugin here serves this draft: it names {others}; spec-trainer plugins lists them"


def serving_commands(target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int) -> dict[str, str]:
    """Return the shell command that serves the draft in ``folder``, for each engine that can serve it.

    An engine is included if its plugin is installed, even if the engine's program is not.
    """
    commands: dict[str, str] = {}
    for name, engine_type in load_each(Engine):
        if isinstance(engine_type, PluginError) or name not in draft.serving_methods:
            continue
        failure = f"engine {name!r} ({find(Engine, name).owner}) fails to name its serving command"
        try:
            with foreign_errors(PluginError, failure):
                engine_type.check_export(target, draft, folder)
                if command := engine_type.serving_command(target, draft, folder, num_draft_tokens):
                    commands[name] = command
        except PluginError as error:
            log.warning("%s", error)
        except SpecError:  # this engine cannot serve it
            continue
    return commands


def closing_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the draft's acceptance length, speed-up and serving commands.

    ``figures`` is the summary of a run or of an evaluation.
    """
    yield f"acceptance length (tau): {_acceptance_length(figures)}"
    if (speedup := figures.get("speedup")) is not None:
        engine = f" in engine {figures['engine']}" if "engine" in figures else ""
        yield f"speed-up: {speedup:.2f} times{engine}"
    for engine, command in figures["serve"].items():
        yield f"serve it with {engine}:\n  {command}"
    if not figures["serve"]:
        yield "no engine that has a plugin here serves this draft; spec-trainer plugins lists them"


def _acceptance_length(figures: Mapping[str, Any]) -> str:
    if (measured := figures.get("acceptance_length")) is not None:
        return f"{measured:.2f} tokens a pass, measured"
    if (simulated := figures.get("eval_acceptance_length")) is not None:
        return f"{simulated:.2f} tokens a pass, simulated on held-out data; spec-trainer evaluate measures it"
    return "not known; spec-trainer evaluate measures it"
