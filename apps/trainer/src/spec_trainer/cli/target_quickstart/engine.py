"""Choose the engine: on a CPU the default, elsewhere one with processes of its own, which is faster there."""

from __future__ import annotations

from spec_core import Draft, Engine, TargetSpec, foreign_errors
from spec_core.errors import PluginError, UsageError
from spec_core.plugins import load_each
from spec_trainer.cli.target_quickstart.recipe import Machine, engine_words
from spec_trainer.configuration.engine_options import EngineOptions, read_engine_options
from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS

Chosen = tuple["EngineOptions", tuple[str, ...]]
"""The options of an engine, and the ``engine.key=value`` arguments from which they were read."""


def choose_engine(name: str | None, machine: Machine, target: TargetSpec, draft: Draft) -> Chosen:
    """Return the engine ``name``; None: the first that has processes of its own and can do all that is needed here.

    If there is none, or the machine is a CPU, return the default engine. Raise UsageError if the engine ``name``, or
    the default one, cannot run the target here.
    """
    if name is None and not machine.is_cpu:
        chosen = _first(machine, target, draft, in_process=False)
        if chosen is not None:
            return chosen
    return _checked(name or DEFAULT_PLUGINS["engine"], machine, target, draft)


def engine_without_start(machine: Machine, target: TargetSpec, draft: Draft) -> Chosen | None:
    """Return the first engine that runs the target in the trainer's process, so that training starts at once."""
    return _first(machine, target, draft, in_process=True)


def _first(machine: Machine, target: TargetSpec, draft: Draft, *, in_process: bool) -> Chosen | None:
    """Return the first engine that can do all that is needed here; None if there is none."""
    for name, engine in load_each(Engine):
        if not isinstance(engine, type) or engine.abilities.in_process is not in_process:
            continue
        try:
            with foreign_errors(PluginError, f"engine {name!r} is passed over"):
                return _checked(name, machine, target, draft)
        except UsageError:
            continue
    return None


def _checked(name: str, machine: Machine, target: TargetSpec, draft: Draft) -> Chosen:
    """Return the engine ``name``. Raise UsageError if it cannot answer, capture and decode with the draft here."""
    options = read_engine_options(name, machine.backend, ())
    words = engine_words(options.engine_type, machine)
    if words:
        options = read_engine_options(name, machine.backend, words)
    engine, config = options.engine_type, options.config.engine
    engine.check_target(config, target)
    engine.check_capture(config, draft.required_features(target))
    engine.check_method(config, draft)
    return options, tuple(words)
