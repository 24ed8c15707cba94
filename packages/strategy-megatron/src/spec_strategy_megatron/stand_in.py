"""Let Megatron run on a device other than CUDA, although its code assumes CUDA.

Within a context, three assumptions in Megatron's code are replaced: tensors that are made on "cuda", types
that are compared with "torch.cuda.FloatTensor" and similar names, and ``torch.cuda.current_device()``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NAMED = "cuda"
"""The device type that Megatron's code names."""


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context for calls of Megatron. The context changes nothing for a CUDA device."""
    return nullcontext() if device.type == _NAMED else _in_place_of_named(device)


@contextmanager
def as_current_device(device: torch.device) -> Iterator[None]:
    """Make ``torch.cuda.current_device`` return ``device``.

    A draft's forward and backward passes in Megatron need no other replacement.
    """
    cuda: Any = torch.cuda
    before = cuda.current_device
    cuda.current_device = before if device.type == _NAMED else lambda: device
    try:
        yield
    finally:
        cuda.current_device = before


@contextmanager
def _in_place_of_named(device: torch.device) -> Iterator[None]:
    with as_current_device(device), _InPlaceOfNamed(device):
        yield


class _InPlaceOfNamed(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        values = dict(kwargs or {})
        if values.get("device") == _NAMED:
            values["device"] = self._device
        result = func(*args, **values)
        if func is torch.Tensor.type and isinstance(result, str):
            return re.sub(r"torch\.(\w+\.)?(?=\w+Tensor$)", "torch.cuda.", result)
        return result
