"""Change torch's settings so that a CPU computes small models faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """Let float32 matrix products use bfloat16 in training, if the hardware supports it.

    Matrix products take less than half the time; accumulation stays in float32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, which is faster for forward passes over a few tokens."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
