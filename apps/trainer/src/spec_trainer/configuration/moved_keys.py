"""Move old keys from section ``train`` to ``optimizer``; older run directories still have them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from spec_core.errors import ConfigError
from spec_core.wording import shown

if TYPE_CHECKING:
    from spec_core import OptimizerConfig

logger = logging.getLogger(__name__)

OLD_KEYS = ("betas", "eps", "weight_decay")


def move_keys(values: dict[str, Any]) -> list[str]:
    """Move keys of earlier versions (``OLD_KEYS``) from section ``train`` to section ``optimizer``.

    ``values``: a configuration. Return the names of the moved keys. Raise ConfigError if ``optimizer``
    already has another value for a key.
    """
    train, optimizer = values.get("train"), values.setdefault("optimizer", {})
    if not (isinstance(train, dict) and isinstance(optimizer, dict)):
        return []
    train, optimizer = cast("dict[str, Any]", train), cast("dict[str, Any]", optimizer)
    found = [key for key in OLD_KEYS if key in train]
    for key in found:
        value = train.pop(key)
        if optimizer.setdefault(key, value) != value:
            raise ConfigError(
                f"train.{key}={shown(value)} and optimizer.{key}={shown(optimizer[key])}: one was the other's name; "
                f"remove train.{key}"
            )
    return found


def warn_of_moved(keys: list[str]) -> None:
    """Log a warning with the new names of the old keys that a user has written."""
    if keys:
        names = ", ".join(f"train.{key} (now optimizer.{key})" for key in keys)
        logger.warning("the configuration has keys by their former names: %s", names)


def moved_values(config: OptimizerConfig) -> dict[str, Any]:
    """Return the optimizer's values of the moved keys, by name."""
    return config.model_dump(mode="json", include=set(OLD_KEYS))
