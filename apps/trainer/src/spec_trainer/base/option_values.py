"""Check numbers that are the values of a command's options. It imports little, for a fast start."""

from __future__ import annotations

import math

from spec_core.errors import ConfigError


def check_least(name: str, value: float | None, least: float) -> None:
    """Raise ConfigError unless the option's value is a finite number of ``least`` or more, or None.

    ``name``: the option's name in Python, such as ``max_new_tokens``.
    """
    if value is not None and not least <= value < math.inf:
        raise ConfigError(f"--{name.replace('_', '-')}={value}: expected {least} or more")


def check_timeout(timeout_s: float) -> None:
    """Raise ConfigError unless ``--timeout-s`` is a number of seconds for which sockets can wait."""
    if not 0 < timeout_s <= 1e6:
        raise ConfigError(f"--timeout-s={timeout_s}: expected seconds above 0, at most 1000000")
