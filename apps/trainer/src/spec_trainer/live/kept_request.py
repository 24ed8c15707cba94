"""KeptRequest is a live request that a run keeps in memory and, with ``follow.retention``, in a file.

Shapes: T tokens, N captured layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class KeptRequest:
    """Token ids of a request and its answer."""

    number: int
    """Number of requests that arrived before this request."""
    input_ids: np.ndarray
    num_prompt: int
    label: str
    states: Tensor | None = None
    """Features [T, N, H] of the T tokens, if a server has captured them."""

    @property
    def num_state_bytes(self) -> int:
        """Size of the features in bytes; 0 without features."""
        return 0 if self.states is None else self.states.nbytes


@dataclass(frozen=True)
class KeptRequests:
    """The requests of a reservoir, and its counters."""

    train: tuple[KeptRequest, ...] = ()
    held_out: tuple[KeptRequest, ...] = ()
    num_seen: int = 0
    """Number of requests that have arrived."""
    num_fresh: int = 0
    """Number of training requests on which the draft was not trained yet."""
