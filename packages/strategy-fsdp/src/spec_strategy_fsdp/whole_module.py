"""WholeModule is a draft that one process trains alone.

It computes what FSDP2 computes on one rank, without FSDP2's work on the host. That work takes as long as a small
draft's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_core.records import DraftBatch, StepOutput


LARGE_BYTES = 16 << 20
"""Size from which on a copy of a weight, and its gradient, are freed as early as possible."""


class WholeModule:
    """A module with float32 master weights, which computes with copies of them in the compute dtype.

    If the compute dtype is float32, there are no copies.
    """

    is_whole: ClassVar[bool] = True
    trained: dict[str, nn.Parameter]
    """Name of each trained weight -> its float32 values."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Replace the weights of ``module`` by copies in ``dtype``; ``begin`` fills them."""
        self._module = module
        self._pass = _Pass()
        self._masters = dict(module.named_parameters(remove_duplicate=False))
        self.trained = {name: master for name, master in module.named_parameters() if master.requires_grad}
        self._copies = {
            master: _copy(master, dtype, self._pass)
            for master in self._masters.values()
            if master.dtype != dtype
        }
        for part in module.modules():
            for name, master in part.named_parameters(recurse=False):
                setattr(part, name, self._copies.get(master, master))

    @torch.no_grad()
    def end_pass(self) -> None:
        """Add the gradients of a backward pass to those of the master weights; call it after each."""
        pairs = [(master, copy) for master, copy in self._copies.items() if copy.grad is not None]
        if not pairs:
            return
        wide = [torch.empty_like(master) for master, _ in pairs]
        torch._foreach_copy_(wide, [copy.grad for _, copy in pairs])
        for (master, copy), grad in zip(pairs, wide, strict=True):
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            copy.grad = None

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the master weights, which the optimizer may have changed, to the weights that compute."""
        for master, copy in self._copies.items():
            if copy.shape != master.shape:  # it was freed
                copy.data = copy.new_empty(master.shape)
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), list(self._copies))

    def forward(
        self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps, *, reduces: bool = True
    ) -> StepOutput:
        """Return the output of a micro-batch. ``reduces``: whether it is the step's last; nothing is reduced."""
        self._pass.is_last = reduces
        output: StepOutput = self._module(batch, denominators, ops)
        return output

    def end_evaluation(self) -> None:
        """Do nothing, because no weights were gathered."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the float32 weights and the buffers."""
        state: dict[str, Tensor] = self._module.state_dict()
        return state | {name: master.detach() for name, master in self._masters.items()}

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return ``whole``, because this process has all of each weight."""
        return whole


@dataclass
class _Pass:
    """The backward pass that is next."""

    is_last: bool = True
    """Whether it is the last of its step."""


def _copy(master: nn.Parameter, dtype: torch.dtype, this: _Pass) -> nn.Parameter:
    """Return a copy of a weight. If it is large, it adds its gradient to that of ``master`` by itself.

    So the gradients of large weights are in memory in one dtype only. Those of the others are added together, which
    takes fewer operations.
    """
    copy = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)

    def add_gradient(copy: Tensor) -> None:
        assert copy.grad is not None
        if master.grad is None:
            master.grad = copy.grad.to(master.dtype)
        else:
            master.grad += copy.grad
        copy.grad = None
        if this.is_last:
            copy.data = copy.new_empty(0)

    if copy.requires_grad and copy.nbytes >= LARGE_BYTES:
        copy.register_post_accumulate_grad_hook(add_gradient)
    return copy
