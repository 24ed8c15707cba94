"""Swap the weights that vLLM has packed for its CPU kernels, between two models of the same shapes.

Packed weights are not tensors, so references to them are swapped. This module does not import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

PACKED = "cpu_linear"
"""Name of vLLM's attribute of a layer: a function that multiplies by the layer's packed weights, which exist
nowhere else."""


def packed_layers(model: nn.Module, foreign: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of ``model`` that have packed weights, by path, except layers of ``foreign``."""
    packed = {path: layer for path, layer in model.named_modules() if PACKED in layer.__dict__}
    if not packed:
        return {}
    not_ours = set(foreign.modules())
    return {path: layer for path, layer in packed.items() if layer not in not_ours}


def packed_steps(live: nn.Module, spare: nn.Module, foreign: nn.Module) -> list[PackedExchange]:
    """Return one PackedExchange for each packed layer of ``live``, except the layers of ``foreign``."""
    theirs = packed_layers(spare, foreign)
    return [PackedExchange(layer, theirs[path]) for path, layer in packed_layers(live, foreign).items()]


class PackedExchange:
    """Swaps the packed weights of a layer between live and spare model, as a step of an ``Exchange``."""

    def __init__(self, live: nn.Module, spare: nn.Module) -> None:
        """Prepare to swap the packed weights of the same layer in two models: ``live`` and ``spare``."""
        self._live = live
        self._spare = spare
        self._before: tuple[object, object] | None = None

    def forget(self) -> None:
        """Forget the previous swap, so that ``undo`` does nothing."""
        self._before = None

    def exchange(self) -> None:
        """Swap the packed weights of the two layers."""
        self._before = live, spare = _packed(self._live), _packed(self._spare)
        _assign(self._live, spare)
        _assign(self._spare, live)

    def undo(self) -> None:
        """Undo the last swap, also if it was only partly done."""
        if self._before is not None:
            live, spare = self._before
            _assign(self._live, live)
            _assign(self._spare, spare)


def _packed(layer: nn.Module) -> object:
    return layer.__dict__.get(PACKED)


def _assign(layer: nn.Module, packed: object) -> None:
    layer.__dict__[PACKED] = packed
