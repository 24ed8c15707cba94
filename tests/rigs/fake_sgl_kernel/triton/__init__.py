"""Import-only stand-in: SGLang defines Triton kernels when it is imported, and runs one of them on a processor."""

import importlib

import torch
from spec_absent import stand_in

stand_in(__name__)
__version__ = "3.0.0"
language = importlib.import_module("triton.language")
language.constexpr = type(
    "constexpr", (), {"__init__": lambda self, value=None: setattr(self, "value", value)}
)


def cdiv(a: int, b: int) -> int:
    return -(a // -b)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 1


def jit(function=None, **options):
    """Return the stand-in of a kernel; a kernel without one stays a function, which cannot be launched."""
    return jit if function is None else _KERNELS.get(function.__name__, function)


class _Kernel:
    def __init__(self, run) -> None:
        self._run = run

    def __getitem__(self, grid):
        return self._run


def _add_gated(hidden_TH, gate_H, shared_TH, output_TH, **options) -> None:
    """Add the output of Qwen's shared expert, times its gate."""
    output_TH += torch.sigmoid(hidden_TH @ gate_H)[:, None] * shared_TH


_KERNELS = {"_fused_gate_sigmoid_mul_add_kernel": _Kernel(_add_gated)}
