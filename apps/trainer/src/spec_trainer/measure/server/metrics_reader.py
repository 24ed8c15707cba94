"""Find the engine plugin that recognizes the metrics of a running server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spec_core import Engine, foreign_errors
from spec_core.errors import PluginError
from spec_core.plugins import find, load_each

if TYPE_CHECKING:
    from spec_core import Serving

log = logging.getLogger(__name__)


def program_of(metrics: str) -> tuple[str, Serving] | None:
    """Return name and Serving of the engine whose plugin recognizes the metrics page, or None."""
    for name, engine_type in load_each(Engine):
        if isinstance(engine_type, PluginError) or engine_type.serving is None:
            continue
        try:
            with foreign_errors(PluginError, f"engine {name!r} ({find(Engine, name).owner}) is passed over"):
                recognized = engine_type.serving.counters(metrics) is not None
        except PluginError as error:
            log.warning("%s, for it cannot say whether metrics are its own", error)
            continue
        if recognized:
            return name, engine_type.serving
    return None
