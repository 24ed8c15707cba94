"""Import-only stand-in: SGLang defines Triton kernels when it is imported, and runs none on a processor."""

import importlib

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
