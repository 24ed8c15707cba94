"""FiniteCheck: whether tensors hold NaN or infinity, wherever they lie. A draft that diverged is never served."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class FiniteCheck:
    """Looks at tensors as they pass; a device is waited for once, when all were added.

    Both extremes of a tensor are NaN if one of its values is, and infinity is an extreme. One call of torch finds
    them and reads each byte once, a small part of the time of a digest.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._extremes: dict[str, Tensor] = {}
        """The least and the greatest value of each tensor, float64 [2]."""

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Look at tensors; their memory may change after what is queued on their devices now."""
        for name, tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                # Torch has no extremes of floats of 8 bits.
                values = tensor.detach().float() if tensor.itemsize == 1 else tensor.detach()
                self._extremes[name] = torch.stack(torch.aminmax(values)).double()

    def problem(self) -> str:
        """Return the name of a tensor that holds NaN or infinity and what to do, in one line; empty for none."""
        for device in {extremes.device for extremes in self._extremes.values()}:
            there = {name: extremes for name, extremes in self._extremes.items() if extremes.device == device}
            for name, extremes in zip(there, torch.stack(list(there.values())).tolist(), strict=True):
                if not all(map(math.isfinite, extremes)):
                    return (
                        f"{name} holds values that are not finite (NaN or infinity): the training diverged or the "
                        "draft was damaged; push an earlier checkpoint"
                    )
        return ""
