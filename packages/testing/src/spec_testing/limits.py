"""Multiply timeouts of the suites by the environment variable SPEC_TESTING_PATIENCE."""

from __future__ import annotations

import math
import os

from spec_core.errors import ConfigError

_VARIABLE = "SPEC_TESTING_PATIENCE"


def patient(seconds: float) -> float:
    """Return ``seconds`` times SPEC_TESTING_PATIENCE, for slow machines or engines.

    The variable reaches the processes that a suite starts. Raise ConfigError if it is not a number of at
    least 1.
    """
    text = os.environ.get(_VARIABLE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 1 <= factor < math.inf:
        raise ConfigError(f"{_VARIABLE}={text!r}: expected by how much to multiply the limits, 1 or more")
    return seconds * factor
