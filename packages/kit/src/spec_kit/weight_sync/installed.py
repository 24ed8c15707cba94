"""Create the weight transports that are installed and usable in this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from spec_core import Backend, WeightTransport, WeightTransportConfig, foreign_errors
from spec_core.errors import ConfigError, PluginError, UsageError
from spec_core.plugins import find, installed, load_available

logger = logging.getLogger(__name__)


def open_weight_transports(
    backend: Backend,
    names: Sequence[str] | None = None,
    options: Mapping[str, object] | None = None,
    configs: Mapping[str, WeightTransportConfig] | None = None,
) -> dict[str, WeightTransport]:
    """Return the weight transports ``names``, in this order, for the device of ``backend``.

    Without ``names``, return every installed transport that is usable here, and log why others are not. A transport
    gets the ``options`` that are fields of its ``Config``; values in ``configs``, by the transport's name, take
    precedence. Raise UsageError if a transport of ``names`` or ``configs`` is not usable, if ``configs`` has a
    transport that ``names`` lacks, or if a key of ``options`` is no option of any transport.
    """
    configs, options = configs or {}, options or {}
    wanted = names or sorted({record.name for record in installed(WeightTransport)})
    if unused := sorted(set(configs) - set(wanted)):
        raise ConfigError(
            f"weight transport {unused[0]!r} has options, but only {', '.join(wanted)} may be used; remove its "
            "options, or name it too"
        )
    transports: dict[str, WeightTransport] = {}
    for name in wanted:
        try:
            transports[name] = _open(name, backend, options, configs.get(name))
        except UsageError as error:
            if names or name in configs:
                raise
            logger.info("%s", error)
    for key in options:
        if not any(key in transport.Config.model_fields for transport in transports.values()):
            raise ConfigError(
                f"no weight transport among {', '.join(transports) or 'none'} has the option {key}; remove it, or "
                "choose one that has it"
            )
    return transports


def _open(
    name: str, backend: Backend, options: Mapping[str, object], config: WeightTransportConfig | None
) -> WeightTransport:
    """Return the transport ``name``. Raise UsageError if it is not usable or its plugin fails."""
    plugin = load_available(WeightTransport, name)
    values = {key: value for key, value in options.items() if key in plugin.Config.model_fields}
    if config is not None:
        values |= {key: getattr(config, key) for key in config.model_fields_set}
    with foreign_errors(ConfigError, f"options of weight transport {name!r}"):
        config = plugin.Config.model_validate(values)
    with foreign_errors(
        PluginError, f"weight transport {name!r} ({find(WeightTransport, name).owner}) fails"
    ):
        return plugin(config, backend)
