"""The same run on the CPU, on a GPU in one process, and on a GPU shared by two: the same loss curve.

::

    pytest tests/gpu/test_loss_curves.py
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest

from ..integration.launching import Lab, losses

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 50
Curve = list[float]

pytestmark = pytest.mark.usefixtures("needs_gpu")


@pytest.fixture(scope="module")
def curve(lab: Lab) -> Callable[[str, str, str], Curve]:
    """(backend, placement, dtype) -> loss of every step. Each run is made once."""

    @cache
    def train(backend: str, placement: str, dtype: str) -> Curve:
        output = lab.folder / f"{backend}-{placement}-{dtype}"
        keys = {"backend__name": backend, "placement__kind": placement, "train__dtype": dtype}
        lab.train(output, train__steps=STEPS, **keys)
        return losses(output)

    return train


@pytest.mark.parametrize("placement", ["inline", "colocated"])
def test_in_float32_a_gpu_follows_the_cpu(curve: Callable[[str, str, str], Curve], placement: str) -> None:
    expected = curve("cpu", "inline", "float32")
    assert expected[-1] < 0.7 * expected[0]
    assert curve("cuda", placement, "float32") == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 1e-2)])
def test_two_processes_of_a_gpu_train_as_one_does(
    curve: Callable[[str, str, str], Curve], dtype: str, tolerance: float
) -> None:
    inline, colocated = (curve("cuda", placement, dtype) for placement in ("inline", "colocated"))
    assert len(colocated) == STEPS
    assert colocated == pytest.approx(inline, rel=tolerance)
