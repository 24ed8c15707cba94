"""This module has the sections of the configuration that plugins extend.

They are strict, frozen models, with defaults in the fields. The field ``name`` is the name of the plugin. The
application fills it in if a configuration names no plugin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import pydantic

Seconds = Annotated[float, pydantic.Field(gt=0, le=1e6)]
"""Seconds, at most 1e6 (eleven days): Python's sockets count milliseconds in 32 bits."""


class Config(pydantic.BaseModel):
    """Base of every configuration section: frozen, strict types, unknown keys are errors."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class BackendConfig(Config):
    """Section ``backend``; a plugin's own options are fields of its subclass."""

    name: str = ""
    """Name of the backend plugin, for the hardware of the run."""


class DraftConfig(Config):
    """Section ``draft``; a draft's own options are fields of its subclass."""

    speed_only: ClassVar[frozenset[str]] = frozenset()
    """Options that change the cost of training, and its result by rounding at most. A run can be resumed with other
    values of these, but not of any other option."""

    name: str = ""
    """Name of the draft plugin: the drafting algorithm."""
    init_from: Path | None = None
    """Folder of a published draft to start from."""


class StrategyConfig(Config):
    """Section ``strategy``; a strategy's own options are fields of its subclass."""

    speed_only: ClassVar[frozenset[str]] = frozenset()
    """Options that change the cost of training, and its result by rounding at most. A run can be resumed with other
    values of these, but not of any other option."""

    name: str = ""
    """Name of the strategy plugin: how the trainer is parallel."""


class OptimizerConfig(Config):
    """Section ``optimizer``; an optimizer's own options are fields of its subclass."""

    speed_only: ClassVar[frozenset[str]] = frozenset()
    """Options that change the cost of training, and its result by rounding at most. A run can be resumed with other
    values of these, but not of any other option."""

    name: str = ""
    """Name of the optimizer plugin, which decides how gradients change the draft."""


class EngineConfig(Config):
    """Section ``engine``; an engine's own options are fields of its subclass."""

    name: str = ""
    """Name of the engine plugin, which runs the target."""
    replicas: int = pydantic.Field(1, ge=1, le=65536)
    """Number of engines. Each of them runs the whole target."""
    replacements: int = pydantic.Field(3, ge=0)
    """How often within 24 hours a run restarts each replica that has died or is silent; after that the run ends. A
    run whose engine is inline or decodes ends at the first failure."""
    tensor_parallel: int = pydantic.Field(1, ge=1)
    """Number of devices over which one replica divides the target."""
    batch_tokens: int = pydantic.Field(8192, ge=1)
    """Largest number of tokens in one forward pass of the target (padding included)."""
    send_timeout_s: Seconds = 300.0
    """Longest wait, in seconds, for the connection to a trainer, and for free memory in a trainer for a sample."""


class LauncherConfig(Config):
    """Section ``launcher``; a launcher's own options are fields of its subclass."""

    name: str = ""
    """Name of the launcher plugin, which starts the processes."""


class WeightTransportConfig(Config):
    """Options of a weight transport; a transport adds further options in its subclass."""

    bucket_bytes: int = pydantic.Field(256 << 20, ge=4096)
    """Largest number of bytes of weights that are sent at once."""
