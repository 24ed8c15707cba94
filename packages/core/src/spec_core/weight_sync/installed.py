"""The weight transports that are installed and can run here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError, PluginError
from spec_core.foreign import foreign_errors
from spec_core.plugins import installed, load_available
from spec_core.weight_transport import WeightTransport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spec_core.backend import Backend

logger = logging.getLogger(__name__)


def open_weight_transports(
    backend: Backend, names: Sequence[str] | None = None, options: Mapping[str, object] | None = None
) -> dict[str, WeightTransport]:
    """Return the weight transports of these names for this process's device, in order.

    Without names it is every installed one that can run here; one that cannot is named in the log, with its reason.
    Each takes those of ``options`` that its ``Config`` has. Digests use the backend's kernel from now on. Raise
    PluginError for a name that cannot be used, ConfigError for an option that none of them has, and for a value that
    one refuses.
    """
    from spec_core.weight_sync.digest import use_digest_kernels

    use_digest_kernels(backend)
    wanted = names or sorted({record.name for record in installed(WeightTransport)})
    options = options or {}
    transports: dict[str, WeightTransport] = {}
    for name in wanted:
        try:
            plugin = load_available(WeightTransport, name)
        except PluginError as error:
            if names:
                raise
            logger.info("%s", error)
        else:
            values = {key: value for key, value in options.items() if key in plugin.Config.model_fields}
            with foreign_errors(ConfigError, f"options of weight transport {name!r}"):
                transports[name] = plugin(plugin.Config.model_validate(values), backend)
    for key in options:
        if not any(key in transport.Config.model_fields for transport in transports.values()):
            raise ConfigError(
                f"no weight transport among {', '.join(transports) or 'none'} has the option {key}; remove it, or "
                "choose one that has it"
            )
    return transports
