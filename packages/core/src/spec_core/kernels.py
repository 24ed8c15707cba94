"""A kernel is a named function that a device runs faster than the same computation in plain torch.

``Backend.kernel(name)`` gives a kernel or None. A draft's distribution may add kernels as entry points of the group
``spec_core.kernels``. An entry point is called ``DEVICE_TYPE:NAME``, such as ``cpu:NAME``. Backends of that device
type use the kernel, unless they have a kernel of the same name themselves. Core has no list of kernel names: a draft
declares each kernel that it can use in its ``KernelSet``. The plain version there documents what the kernel takes
and returns.

Contract of a kernel, which ``spec_testing.assert_kernel_agrees`` compares with the plain version:

N1  A kernel has the arguments and the result of the plain version; results differ by rounding only. If the plain
    version is differentiable, the kernel is, too. A kernel whose name ends in ``_`` overwrites its first argument.
N2  A kernel returns NotImplemented, before it has changed anything, for a dtype or shape that it does not support.
    The plain version then runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

Kernel = Callable[..., Any]
FindKernel = Callable[[str], Kernel | None]
"""Function that returns the kernel of a name, or None. ``plugins.find_kernel`` returns it for a backend."""


def no_kernel(name: str) -> None:
    """Return None for every name, so that a draft runs in plain torch."""


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """The kernels that a draft can use. A field has a kernel's name, and the plain version as default.

    A default of None means that the draft computes in another way if the backend has no such kernel.
    """

    @classmethod
    def of(cls, find: FindKernel) -> Self:
        """Return the set with each kernel that ``find`` finds, and with the plain versions of the others.

        Called once, when a draft is built.
        """
        return cls(**{name: _with_plain(find(name), plain) for name, plain in vars(cls()).items()})

    def attach(self, module: nn.Module) -> None:
        """Let kernels compute parts of a new module that do not call them; by default, none."""

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return, for each kernel's name, arguments on which tests compare the kernel with its plain version.

        ``draw(*shape)`` returns a random float32 tensor on the backend's device. Gradients are compared with
        respect to the tensors that require one.
        """
        return {}


def _with_plain(kernel: Kernel | None, plain: Kernel | None) -> Kernel | None:
    """Return a function that calls the kernel, and the plain version if it returns NotImplemented (N2)."""
    if kernel is None or plain is None:
        return kernel or plain

    def call(*arguments: Any) -> Any:
        result = kernel(*arguments)
        return plain(*arguments) if result is NotImplemented else result

    return call
