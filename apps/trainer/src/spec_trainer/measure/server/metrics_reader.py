"""Read the counters of a running server by the engine plugin that recognizes its page of metrics."""

from __future__ import annotations

import logging
from collections.abc import Container

from spec_core import Engine, Serving, foreign_errors
from spec_core.errors import PluginError, SpecError
from spec_core.foreign import cause
from spec_core.plugins import find, load_each
from spec_core.records import ServerCounters
from spec_trainer.measure.server.checked_counters import checked_counters

log = logging.getLogger(__name__)


def read_counters(
    metrics: str, url: str, engines: Container[str] | None = None
) -> tuple[str, ServerCounters] | None:
    """Return the name of the engine whose plugin recognizes the metrics of the server ``url``, and its counters.

    ``engines``: names of the plugins to ask; None means all. Return None if all say that the metrics are another
    program's. If a plugin fails or returns invalid counters, and no other recognizes the metrics, raise PluginError.
    """
    failures: list[PluginError] = []
    for name, engine_type in load_each(Engine, engines):
        if isinstance(engine_type, PluginError) or engine_type.serving is None:
            continue
        try:
            counters = _counters(name, engine_type.serving, metrics, url)
        except PluginError as error:
            failures.append(error)
            continue
        if counters is not None:
            for failure in failures:
                log.warning("%s; engine %r can", failure, name)
            return name, counters
    for failure in failures:
        raise failure
    return None


def _counters(name: str, serving: Serving, metrics: str, url: str) -> ServerCounters | None:
    problem = f"engine {name!r} ({find(Engine, name).owner}) cannot read the metrics of {url}"
    with foreign_errors(PluginError, problem):
        try:
            answer = serving.counters(metrics)
        except SpecError as error:  # foreign_errors would pass it on without the plugin's name
            raise ValueError(cause(error)) from error
        return checked_counters(answer)
