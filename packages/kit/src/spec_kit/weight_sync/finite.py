"""FiniteCheck finds NaN and infinity in tensors on any device; a diverged draft is never served."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class FiniteCheck:
    """Checks tensors while they are iterated over, and waits for the device only in ``problem``.

    The minimum and maximum of a tensor are NaN if any value is NaN, and infinite if a value is infinite.
    ``torch.aminmax`` finds both and reads each byte once, which takes much less time than a digest.
    """

    def __init__(self) -> None:
        """Start without tensors."""
        self._extremes: defaultdict[tuple[torch.device, torch.dtype], dict[str, tuple[Tensor, Tensor]]] = (
            defaultdict(dict)
        )
        """(Device, dtype) -> tensor name -> minimum and maximum of the tensor."""

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``tensors`` unchanged, and queue a check for NaN and infinity before each is yielded.

        The check precedes later work on the current stream. So the caller may overwrite a tensor there.
        """
        for name, tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                # torch.aminmax does not support 8-bit floats.
                values = tensor.detach().float() if tensor.itemsize == 1 else tensor.detach()
                least, greatest = torch.aminmax(values)
                self._extremes[least.device, least.dtype][name] = least, greatest
            yield name, tensor

    def problem(self) -> str:
        """Return an error message of one line that names a tensor with NaN or infinity; empty if there is none."""
        for extremes in self._extremes.values():
            pairs = torch.stack([value for pair in extremes.values() for value in pair]).view(-1, 2)
            for name, pair in zip(extremes, pairs.tolist(), strict=True):
                if not all(map(math.isfinite, pair)):
                    return (
                        f"{name} holds values that are not finite (NaN or infinity): the training diverged or the "
                        "draft was damaged; push an earlier checkpoint"
                    )
        return ""
