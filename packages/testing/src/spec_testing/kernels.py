"""Compare a backend's kernels with their plain torch versions (see ``spec_core.kernels``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spec_core import FindKernel, Kernel, KernelSet

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""dtype -> largest ‖difference‖ / ‖result‖. Kernels are tested with these dtypes in this order."""


def drawing(device: torch.device) -> Callable[..., Tensor]:
    """Return a function that draws a normal float32 tensor of a shape, with equal values on every device."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    return draw


def compared_kernels(find: FindKernel, kernels: type[KernelSet], draw: Callable[..., Tensor]) -> list[str]:
    """Compare each kernel that ``find`` finds with its plain version, on the examples of ``kernels``.

    Return the names of the kernels that supported the example.
    """
    examples = kernels.examples(draw)
    found = [(name, find(name), plain) for name, plain in vars(kernels()).items()]
    return [
        name
        for name, kernel, plain in found
        if kernel is not None and plain is not None and assert_kernel_agrees(kernel, plain, examples[name])
    ]


def assert_kernel_agrees(kernel: Kernel, plain: Kernel, arguments: Sequence[object]) -> bool:
    """Compare a kernel's values and gradients with the plain version in float64.

    Return whether the kernel supports these shapes in one of the dtypes of ``TOLERANCES``.
    """
    for dtype in TOLERANCES:
        taken = _cast(tuple(arguments), dtype)
        before = _cast(taken, torch.float64)
        result = kernel(*taken)
        if result is not NotImplemented:
            _compare(_outcome(result, taken), _outcome(plain(*before), before), TOLERANCES[dtype])
            return True
        for left, right in zip(_tensors(taken), _tensors(before), strict=True):
            assert torch.equal(left.to(right.dtype), right), "N2: an argument was changed, then declined"
    return False


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a value with its floating-point tensors in ``dtype``; other values are unchanged."""
    if isinstance(value, Tensor):
        copy = value.detach().to(dtype if value.is_floating_point() else value.dtype, copy=True)
        return copy.requires_grad_(value.requires_grad)
    if isinstance(value, tuple | list):
        return type(value)(_cast(part, dtype) for part in value)  # pyright: ignore
    return value


def _outcome(result: object, arguments: object) -> list[Tensor]:
    """Return the result's tensors, and the gradients of the arguments that require gradients."""
    values = list(_tensors(result))
    inputs = [t for t in _tensors(arguments) if t.requires_grad]
    if not inputs:
        return values
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(value.shape, generator=generator).to(value) for value in values]
    return [*values, *torch.autograd.grad(values, inputs, grads)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:  # pyright: ignore
            yield from _tensors(part)


def _compare(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for actual, reference in zip(got, expected, strict=True):
        assert actual.shape == reference.shape
        if not reference.is_floating_point():
            assert torch.equal(actual, reference)
            continue
        error = (actual.double() - reference).norm() / reference.norm().clamp(min=1e-30)
        assert error < tolerance, (
            f"differs from the plain version by {error:.1e}, at most {tolerance} is expected"
        )
