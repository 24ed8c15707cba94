"""Recompute a function's activations in the backward pass (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from torch.utils.checkpoint import checkpoint

P = ParamSpec("P")
R = TypeVar("R")


def checkpointed(function: Callable[P, R], *, enabled: bool = True) -> Callable[P, R]:
    """Return ``function``, with activation checkpointing if ``enabled``.

    Autograd then saves only the arguments of a call, and recomputes its activations. The function must draw no
    random numbers, and must not read or write state that changes between the two computations. For example, it
    gets the content of a cache as arguments and returns the new entries. Pass each tensor as a separate argument,
    not in a container, because an outer checkpoint frees only separate tensors.
    """
    if not enabled:
        return function
    # The function draws no random numbers, so the state of the generators need not be stored.
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
