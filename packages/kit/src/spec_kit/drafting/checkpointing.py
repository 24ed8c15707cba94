"""Activation checkpointing: parts of a network that are computed again in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def checkpointed(function: Callable[P, R], *, enabled: bool = True) -> Callable[P, R]:
    """Return the function, of which autograd keeps the arguments alone where ``enabled``.

    It must draw no random numbers, and neither read nor write what changes between the two computations: what it
    adds to a cache it takes as an argument and returns. Pass tensors as arguments of their own, not in containers:
    an outer checkpoint drops only those.
    """
    if not enabled:
        return function
    # Nothing in it is random: the state of the generators need not be kept.
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
