"""Check that a sample fits the window, and that a released sample has been received."""

from __future__ import annotations

from typing import TypeVar

from spec_core.errors import ConfigError, ProtocolError
from spec_core.records import FeatureSample

T = TypeVar("T")


def check_size(sample: FeatureSample, window_bytes: int) -> None:
    """Raise ConfigError for a sample that is larger than the window (T5)."""
    if sample.num_bytes > window_bytes:
        raise ConfigError(
            f"sample {sample.request_id} has {sample.num_bytes} bytes of features, "
            f"placement.window_bytes={window_bytes}; raise it or lower data.max_length"
        )


def take_held(held: dict[FeatureSample, T], sample: FeatureSample) -> T:
    """Remove a released sample from ``held``, the received samples; return the value stored with it (T4)."""
    if (found := held.pop(sample, None)) is None:
        raise ProtocolError(f"sample {sample.request_id} is not held: released twice or never received")
    return found
