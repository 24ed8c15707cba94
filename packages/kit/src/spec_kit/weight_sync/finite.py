"""FiniteCheck: whether tensors hold NaN or infinity, wherever they lie. A draft that diverged is never served."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


class FiniteCheck:
    """Looks at tensors as they pass; a device is waited for when all have passed.

    Both extremes of a tensor are NaN if one of its values is, and infinity is an extreme. One call of torch finds
    them and reads each byte once, a small part of the time of a digest.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._extremes: defaultdict[tuple[torch.device, torch.dtype], dict[str, tuple[Tensor, Tensor]]] = (
            defaultdict(dict)
        )
        """The least and the greatest value of each tensor, apart by where they lie and in which dtype."""

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, and look at each as it passes: its memory may change after what is queued on its device."""
        for name, tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                # Torch has no extremes of floats of 8 bits.
                values = tensor.detach().float() if tensor.itemsize == 1 else tensor.detach()
                least, greatest = torch.aminmax(values)
                self._extremes[least.device, least.dtype][name] = least, greatest
            yield name, tensor

    def problem(self) -> str:
        """Return the name of a tensor that holds NaN or infinity and what to do, in one line; empty for none."""
        for extremes in self._extremes.values():
            pairs = torch.stack([value for pair in extremes.values() for value in pair]).view(-1, 2)
            for name, pair in zip(extremes, pairs.tolist(), strict=True):
                if not all(map(math.isfinite, pair)):
                    return (
                        f"{name} holds values that are not finite (NaN or infinity): the training diverged or the "
                        "draft was damaged; push an earlier checkpoint"
                    )
        return ""
