"""Kernels: what is done faster than in plain torch on some device, by name.

``Backend.kernel(name)`` gives a kernel or None. A draft brings kernels of its own as entry points of the group
``spec_core.kernels``, called ``"cpu:NAME"`` with the device type of the backends that are to use it; a backend's own
kernel of that name is preferred. Drafts know the names, core lists none: a draft that can use a kernel
declares it in its ``KernelSet``, and the plain version of that name documents what the kernel takes and returns.

Contract of a kernel, which ``spec_testing.assert_kernel_agrees`` compares with the plain version:

K1  It takes the arguments of the plain version and returns what that returns; results differ by rounding only.
    Where the plain version is differentiable, the kernel is. A name that ends in ``_`` overwrites its first argument.
K2  For a dtype or shape that it is not written for it returns NotImplemented, before it has changed anything: then
    the plain version runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Kernel = Callable[..., Any]
FindKernel = Callable[[str], Kernel | None]
"""Gives the kernel of a name, or None; ``plugins.find_kernel`` makes one for a backend."""


def no_kernel(name: str) -> None:
    """Find no kernel: drafts run in plain torch."""


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """The kernels that a draft can use. A field's name is the kernel's, its default the plain version.

    A default of None means that the draft goes another way where the backend has no such kernel.
    """

    @classmethod
    def of(cls, find: FindKernel) -> Self:
        """Return the kernels that are found, and plain versions of the others: done once, when a draft is built."""
        return cls(**{name: _with_plain(find(name), plain) for name, plain in vars(cls()).items()})

    @classmethod
    def examples(cls, draw: Callable[..., Tensor]) -> Mapping[str, tuple[object, ...]]:
        """Return arguments to compare each kernel with its plain version on.

        ``draw(*shape)`` gives a float32 tensor on the backend's device. Gradients are compared with respect to the
        tensors that require one.
        """
        return {}


def _with_plain(kernel: Kernel | None, plain: Kernel | None) -> Kernel | None:
    """Return the kernel with the plain version behind it (K2)."""
    if kernel is None or plain is None:
        return kernel or plain

    def call(*arguments: Any) -> Any:
        result = kernel(*arguments)
        return plain(*arguments) if result is NotImplemented else result

    return call
