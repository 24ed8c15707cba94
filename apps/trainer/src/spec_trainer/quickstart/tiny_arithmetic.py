"""How a CPU computes models of a few million parameters fast."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """Let matrix products of float32 use bfloat16 where the hardware can: to train, not to compare.

    Products take less than half the time; sums stay float32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: a forward pass over a few tokens is over before other threads have begun."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
