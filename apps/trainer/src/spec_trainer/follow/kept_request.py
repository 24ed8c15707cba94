"""KeptRequest: a live request as a run keeps it, in memory and, if ``follow.retention`` is on, in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class KeptRequest:
    """Token ids of a request and its answer."""

    number: int
    """Number of requests that arrived before this request."""
    input_ids: np.ndarray
    num_prompt: int
    label: str


@dataclass(frozen=True)
class KeptRequests:
    """The requests of a reservoir, and its counters."""

    train: tuple[KeptRequest, ...] = ()
    held_out: tuple[KeptRequest, ...] = ()
    num_seen: int = 0
    """Number of requests that have arrived."""
    num_fresh: int = 0
    """Number of training requests that nothing was trained on yet."""
