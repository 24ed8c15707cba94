"""NaN and infinity are found wherever they stand, and nothing else is."""

import math

import pytest
import torch

from spec_kit.weight_sync.finite import FiniteCheck

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


def problem(**tensors: torch.Tensor) -> str:
    check = FiniteCheck()
    assert [name for name, _ in check.watch(tensors.items())] == list(tensors)
    return check.problem()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40, -1])
def test_one_value_of_any_dtype_is_found_by_its_tensor(dtype, value, place):
    values = torch.linspace(-3, 3, 81).to(dtype)
    wrong = values.clone()
    wrong[place] = value
    assert problem(fine=values, ids=torch.arange(3), turned=values.view(9, 9).t()) == ""
    assert problem(fine=values, wrong=wrong, also=values.float()).startswith(
        "wrong holds values that are not finite"
    )


def test_the_largest_numbers_are_finite_and_no_tensor_is_without_a_verdict():
    largest = {str(dtype): torch.full((), torch.finfo(dtype).max, dtype=dtype) for dtype in FLOATS}
    flags = torch.tensor([True, False])
    assert problem(**largest, flags=flags, nothing=torch.empty(0, 3)) == ""
    assert problem() == ""
