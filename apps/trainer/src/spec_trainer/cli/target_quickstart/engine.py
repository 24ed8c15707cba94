"""Choose the engine: on a CPU the default, elsewhere one with processes of its own, which is faster there."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from spec_core import Draft, Engine, TargetSpec, foreign_errors
from spec_core.errors import PluginError, UsageError
from spec_core.plugins import load_each
from spec_trainer.cli.engine_output import engine_output_kept
from spec_trainer.cli.target_quickstart.recipe import Machine, engine_words
from spec_trainer.configuration.engine_options import EngineOptions, read_engine_options
from spec_trainer.configuration.plugin_names import DEFAULT_PLUGINS
from spec_trainer.training.wiring import create_engine

Chosen = tuple["EngineOptions", tuple[str, ...]]
"""The options of an engine, and the ``engine.key=value`` arguments from which they were read."""


class AnsweringEngine:
    """The engine that writes the questions and the answers of a round; it starts once for both."""

    def __init__(self, options: EngineOptions, target: TargetSpec) -> None:
        """Start nothing: the first use does."""
        self._options = options
        self._target = target
        self._engine: Engine | None = None
        self._started = ExitStack()

    def started(self) -> Engine:
        """Return the running engine; start it if none runs."""
        if self._engine is None:
            self._started.enter_context(engine_output_kept(self._options.engine_type))
            engine = create_engine(self._options, self._target, reuse_prefixes=True)
            self._engine = self._started.enter_context(engine)
        return self._engine

    def close(self) -> None:
        """End the engine, if it runs; a later use starts it again."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *error: Any) -> None:
        """End the engine as ``close`` does; if there was an error, its output stays."""
        self._engine = None
        self._started.__exit__(*error)


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
    engine = options.engine_type
    config = options.config.engine
    engine.check_target(config, target)
    engine.check_capture(config, draft.required_features(target))
    engine.check_method(config, draft)
    return options, tuple(words)
