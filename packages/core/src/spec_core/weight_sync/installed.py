"""The weight transports that are installed and can run here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spec_core.errors import PluginError
from spec_core.plugins import installed, load_available
from spec_core.weight_transport import WeightTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core.backend import Backend

logger = logging.getLogger(__name__)


def open_weight_transports(
    backend: Backend, names: Sequence[str] | None = None
) -> dict[str, WeightTransport]:
    """Return weight transports with their default options, for this process's device: those of these names, in order.

    Without names it is every installed one that can run here; one that cannot is named in the log, with its reason.
    Raise PluginError for a name that cannot be used.
    """
    wanted = names or sorted({record.name for record in installed(WeightTransport)})
    transports: dict[str, WeightTransport] = {}
    for name in wanted:
        try:
            plugin = load_available(WeightTransport, name)
        except PluginError as error:
            if names:
                raise
            logger.info("%s", error)
        else:
            transports[name] = plugin(plugin.Config.model_validate({}), backend)
    return transports
