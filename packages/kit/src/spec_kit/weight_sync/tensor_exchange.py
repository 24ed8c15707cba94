"""Exchange the contents of two models of one architecture in place, either completely or not at all.

Tensor addresses do not change, so captured device graphs stay valid. Storages are exchanged one after the
other, through a scratch buffer that was allocated before. If a step fails, all steps are undone; to undo
them, each span of a storage counts its finished copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from spec_core.errors import EngineError

Address = tuple["torch.device", int]
"""Device and address of a tensor's storage."""
_HOLDERS = (torch.Tensor, list, tuple)
"""Types of the attributes that can hold tensors.

``isinstance`` is called for every attribute of a target, and is faster with a tuple than with a union of
types.
"""
_SPAN_BYTES = 64 << 20
"""Most bytes that are exchanged at a time, and the largest size of a scratch buffer."""


class TornDraftError(EngineError):
    """The exchange failed and could not be undone: the live draft is neither the old nor the new draft."""


def storage_address(tensor: Tensor) -> Address:
    """Return the device and address of the tensor's storage; tensors with the same result share memory."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def storage_addresses(model: nn.Module) -> frozenset[Address]:
    """Return the storage addresses of a model's parameters, buffers and plain tensor attributes."""
    return frozenset(
        storage_address(tensor) for module in model.modules() for _, tensor in _tensors_in(module)
    )


def plain_tensors(model: nn.Module, lent: Collection[str] = ()) -> dict[str, Tensor]:
    """Return parameters, buffers and plain tensor attributes of ``model``, by path.

    Attributes named in ``lent``, meta tensors and tensors with empty storage are left out.
    """
    return {
        f"{path}.{name}": tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in _tensors_in(module, lent)
        if not tensor.is_meta and tensor.untyped_storage().nbytes()
    }


class ExchangeStep(Protocol):
    """One step of an exchange, which can be undone."""

    def forget(self) -> None:
        """Forget the previous exchange; ``undo`` then undoes only the next one."""

    def exchange(self) -> None:
        """Exchange the contents that this step covers."""

    def undo(self) -> None:
        """Undo the exchange, even if it failed halfway."""


class Exchange:
    """Exchanges the contents of a live model and its spare copy, one pair of storages after the other."""

    def __init__(
        self, live: Mapping[str, Tensor], spare: Mapping[str, Tensor], others: Sequence[ExchangeStep] = ()
    ) -> None:
        """Pair the tensors of both models by path, and allocate scratch buffers.

        Tensors that the models share are skipped. ``others``: steps that run after the tensors are exchanged.
        Raise EngineError, without any change, if the models do not match.
        """
        pairs = _storage_pairs(live, spare)
        scratch = _scratch([ours for ours, _ in pairs])
        self._steps: list[ExchangeStep] = [
            _Span(ours, theirs, scratch[ours.device][: len(ours)])
            for pair in pairs
            for ours, theirs in zip(*(part.split(_SPAN_BYTES) for part in pair), strict=True)
        ]
        self._steps += others
        self._devices = [device for device, part in scratch.items() if not part.is_cpu]

    @torch.inference_mode()
    def run(self) -> None:
        """Exchange everything, and synchronize the devices.

        If a step fails, undo all steps and raise the step's error. Raise TornDraftError if undoing fails,
        too.
        """
        begun: list[ExchangeStep] = []
        for step in self._steps:
            step.forget()
        try:
            for step in self._steps:
                begun.append(step)
                step.exchange()
            self._synchronize()
        except BaseException as error:
            try:
                for step in reversed(begun):
                    step.undo()
                self._synchronize()
            except BaseException as second:  # noqa: BLE001 (a draft that is half of each must not serve)
                raise TornDraftError(f"the draft was left half exchanged: {error}; then {second}") from error
            raise

    def _synchronize(self) -> None:
        for device in self._devices:
            torch.accelerator.synchronize(device)


@dataclass(eq=False)
class _Span:
    """Bytes of one storage in both models, and a scratch buffer of that length, shared with other spans."""

    live: Tensor
    spare: Tensor
    scratch: Tensor
    copied: int = 0
    """Number of the three copies of ``exchange`` that are known to be done."""

    def forget(self) -> None:
        """Forget the previous exchange; ``undo`` then undoes only the next one."""
        self.copied = 0

    def exchange(self) -> None:
        _copy(self.scratch, self.live)
        self.copied = 1
        _copy(self.live, self.spare)
        self.copied = 2
        _copy(self.spare, self.scratch)
        self.copied = 3

    def undo(self) -> None:
        """Undo the exchange, even if it failed halfway; a copy that is partly done does no harm."""
        if self.copied == 3:
            self.exchange()
            return
        if self.copied == 2:
            _copy(self.spare, self.live)
        if self.copied >= 1:
            _copy(self.live, self.scratch)


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


def _tensors_in(module: nn.Module, lent: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    fields = module.__dict__
    # The items are copied, since the engine may set an attribute meanwhile.
    for name, value in [*fields.items(), *fields["_parameters"].items(), *fields["_buffers"].items()]:
        if isinstance(value, _HOLDERS) and name not in lent:
            if isinstance(value, torch.Tensor):
                yield name, value
            else:
                for index, entry in enumerate(value):
                    if isinstance(entry, torch.Tensor):
                        yield f"{name}.{index}", entry


def _storage_pairs(live: Mapping[str, Tensor], spare: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the bytes of each storage in both models, as pairs of uint8 tensors.

    Each storage has one pair, even if several tensors share it.
    """
    counterparts: dict[Address | None, Address | None] = {}
    pairs: dict[Address | None, tuple[Tensor, Tensor]] = {}
    for path in dict.fromkeys([*live, *spare]):
        ours, theirs = live.get(path), spare.get(path)
        here, there = (None if tensor is None else storage_address(tensor) for tensor in (ours, theirs))
        if here == there:
            continue  # both models share it, such as a table of rotary angles
        if ours is None or theirs is None or _outline(ours) != _outline(theirs):
            raise EngineError(
                f"the loaded draft does not match the serving one: {path} is {_named(theirs)}, "
                f"expected {_named(ours)}"
            )
        if (counterparts.setdefault(here, there), counterparts.setdefault(there, here)) != (there, here):
            raise EngineError(f"the loaded draft does not match the serving one: {path} shares other memory")
        if here not in pairs:
            pairs[here] = _bytes(ours), _bytes(theirs)
    return list(pairs.values())


def _outline(tensor: Tensor) -> tuple[object, ...]:
    memory = tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.storage_offset(), memory


def _named(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _scratch(parts: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    sizes: dict[torch.device, int] = {}
    for part in parts:
        sizes[part.device] = max(sizes.get(part.device, 0), min(len(part), _SPAN_BYTES))
    return {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}
