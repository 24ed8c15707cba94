"""Kernels by name: found once, tried first, compared with their plain versions."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from spec_core import KernelSet, no_kernel
from spec_testing.kernels import assert_kernel_agrees, drawing

DRAW = drawing(torch.device("cpu"))


def double(x: Tensor) -> Tensor:
    return 2 * x


@dataclass(frozen=True, kw_only=True)
class Doubling(KernelSet):
    double: Callable[[Tensor], Tensor] = double
    causal_attention: Callable[..., Tensor] | None = None


def only_long(x: Tensor) -> Tensor:
    return x.new_full(x.shape, 7) if len(x) > 3 else NotImplemented


def test_a_set_is_plain_where_the_backend_has_nothing():
    found = Doubling.of(no_kernel)
    assert found == Doubling()
    assert found.double is double


def test_a_set_asks_for_its_names_once():
    asked = []
    Doubling.of(asked.append).double(torch.ones(2))
    assert asked == ["double", "causal_attention"]


def test_what_a_kernel_declines_the_plain_version_does():
    found = Doubling.of({"double": only_long}.get)
    assert found.double(torch.ones(4)).tolist() == [7] * 4
    assert found.double(torch.ones(2)).tolist() == [2, 2]


def test_a_kernel_without_a_plain_version_is_given_as_it_is():
    assert Doubling.of({"causal_attention": double}.get).causal_attention is double


def in_place_(x: Tensor, y: Tensor) -> Tensor:
    return x.mul_(y)


def test_rounding_is_agreement_and_a_declined_dtype_goes_on_to_the_next():
    arguments = DRAW(5).requires_grad_(), DRAW(5)
    assert assert_kernel_agrees(lambda x, y: (x * y) * (1 + 1e-6), lambda x, y: x * y, arguments)
    assert assert_kernel_agrees(in_place_, in_place_, (DRAW(5), DRAW(5)))

    def half_only(x: Tensor) -> Tensor:
        return x + x if x.dtype == torch.bfloat16 else NotImplemented

    assert assert_kernel_agrees(half_only, double, (DRAW(5),))
    assert not assert_kernel_agrees(lambda x: NotImplemented, double, (DRAW(5),))


def wrong_gradient(x: Tensor) -> Tensor:
    return 2 * x.detach() + 0 * x


def changes_then_declines(x: Tensor) -> Tensor:
    x.zero_()
    return NotImplemented


@pytest.mark.parametrize("kernel", [lambda x: 2.01 * x, wrong_gradient, changes_then_declines])
def test_a_kernel_that_breaks_its_contract_is_found(kernel):
    x = DRAW(5) if kernel is changes_then_declines else DRAW(5).requires_grad_()
    with pytest.raises(AssertionError):
        assert_kernel_agrees(kernel, double, (x,))
