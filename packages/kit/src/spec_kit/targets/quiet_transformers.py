"""Hide what transformers logs and warns of while it reads a config.json, such as old names of keys."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Let transformers log errors only, and no code warn, within the context."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(level)
