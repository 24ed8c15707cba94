"""Keys of the configuration that have other places than in an earlier version."""

from __future__ import annotations

from typing import Any

from spec_core.errors import ConfigError


def check_moved_keys(values: dict[str, Any], source: str) -> None:
    """Raise ConfigError for a key of an earlier version, with its new place."""
    train = values.get("train")
    if isinstance(train, dict) and "strategy" in train:
        name = train["strategy"]
        raise ConfigError(f"{source}: train.strategy={name} has moved; write strategy.name={name}")


def with_new_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return a ``config.yaml`` that an earlier version wrote, with keys that have moved in their new places."""
    train = dict(values.get("train", {}))
    if "strategy" in train:
        return {**values, "strategy": {"name": train.pop("strategy")}, "train": train}
    return values
