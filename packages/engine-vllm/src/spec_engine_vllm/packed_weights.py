"""Weights that vLLM has packed for the CPU. They are in no tensor, so they are exchanged by assignment.

Imports no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

PACKED = "cpu_linear"
"""vLLM's name for a layer's product with weights that were packed for the CPU; they are nowhere else."""


def packed_layers(model: nn.Module, foreign: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of ``model``, by path, whose weights were packed; without those that ``foreign`` has, too."""
    packed = {path: layer for path, layer in model.named_modules() if PACKED in layer.__dict__}
    if not packed:
        return {}
    not_ours = set(foreign.modules())
    return {path: layer for path, layer in packed.items() if layer not in not_ours}


def packed_steps(live: nn.Module, spare: nn.Module, foreign: nn.Module) -> list[PackedExchange]:
    """Return what exchanges the packed weights of both models, layer by layer."""
    theirs = packed_layers(spare, foreign)
    return [PackedExchange(layer, theirs[path]) for path, layer in packed_layers(live, foreign).items()]


class PackedExchange:
    """The packed weights of one layer, on both sides: a step of an ``Exchange``."""

    def __init__(self, live: nn.Module, spare: nn.Module) -> None:
        """Exchange what these two layers hold."""
        self._live, self._spare = live, spare
        self._before: tuple[object, object] | None = None

    def forget(self) -> None:
        """Forget the exchange before."""
        self._before = None

    def exchange(self) -> None:
        """Give each layer what the other one has."""
        self._before = live, spare = _packed(self._live), _packed(self._spare)
        _assign(self._live, spare)
        _assign(self._spare, live)

    def undo(self) -> None:
        """Take back an exchange, or what was done of it."""
        if self._before is not None:
            live, spare = self._before
            _assign(self._live, live)
            _assign(self._spare, spare)


def _packed(layer: nn.Module) -> object:
    return layer.__dict__.get(PACKED)


def _assign(layer: nn.Module, packed: object) -> None:
    layer.__dict__[PACKED] = packed
