"""Exchange the contents of two models of one architecture, in place: wholly, or not at all.

Addresses stay, so that graphs that were captured with them stay valid. The bytes of one storage after the other go
by way of a scratch that was allocated before; whatever fails is undone from what each span notes about itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from spec_core.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor, nn

Address = tuple["torch.device", int]
"""Device and address of a tensor's storage."""
_SPAN_BYTES = 64 << 20
"""Most bytes that are exchanged at a time: the size of the scratch."""


class TornDraftError(EngineError):
    """The exchange failed, and so did undoing it: the live draft is neither the old nor the new one."""


def storage_addresses(model: nn.Module) -> frozenset[Address]:
    """Return where parameters, buffers and plain tensor attributes of a model lie."""
    return frozenset(_address(tensor) for _, tensor in _tensors_of(model))


def owned_tensors(
    model: nn.Module, foreign: Collection[Address], lent: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return parameters, buffers and plain tensor attributes of ``model``, by path.

    Left out are attributes named in ``lent``, what lies at one of the addresses ``foreign``, and what has no bytes.
    """
    return {
        path: tensor
        for path, tensor in _tensors_of(model, lent)
        if not tensor.is_meta and tensor.untyped_storage().nbytes() and _address(tensor) not in foreign
    }


class ExchangeStep(Protocol):
    """One part of an exchange."""

    def forget(self) -> None:
        """Forget the exchange before: what is undone is the next one."""

    def exchange(self) -> None:
        """Exchange this part."""

    def undo(self) -> None:
        """Take back an exchange, or what was done of it."""


class Exchange:
    """The contents of a live model and of its spare, pair by pair."""

    def __init__(
        self, live: Mapping[str, Tensor], spare: Mapping[str, Tensor], others: Sequence[ExchangeStep] = ()
    ) -> None:
        """Pair what both models own, by path, and allocate a scratch; ``others`` are exchanged after the tensors.

        Raise EngineError where the models do not match. Nothing has changed then.
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
        """Exchange everything, and wait for the device.

        What fails is undone and raised again; raise TornDraftError where that fails, too.
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
    """Bytes of one storage on both sides, and a scratch of their length that other spans use, too."""

    live: Tensor
    spare: Tensor
    scratch: Tensor
    copied: int = 0
    """How many of the three copies are known to be done."""

    def forget(self) -> None:
        """Forget the exchange before: what is undone is the next one."""
        self.copied = 0

    def exchange(self) -> None:
        _copy(self.scratch, self.live)
        self.copied = 1
        _copy(self.live, self.spare)
        self.copied = 2
        _copy(self.spare, self.scratch)
        self.copied = 3

    def undo(self) -> None:
        """Take back an exchange, or what was done of it; what the next copy has done does no harm."""
        if self.copied == 3:
            self.exchange()
            return
        if self.copied == 2:
            _copy(self.spare, self.live)
        if self.copied >= 1:
            _copy(self.live, self.scratch)


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


def _tensors_of(model: nn.Module, lent: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        fields = module.__dict__
        for name, value in {**fields, **fields["_parameters"], **fields["_buffers"]}.items():
            if isinstance(value, torch.Tensor):
                if name not in lent:
                    yield f"{path}.{name}", value
            elif isinstance(value, list | tuple) and name not in lent:
                for index, entry in enumerate(value):
                    if isinstance(entry, torch.Tensor):
                        yield f"{path}.{name}.{index}", entry


def _address(tensor: Tensor) -> Address:
    """Return where the tensor's storage lies: two tensors with one address share memory."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def _storage_pairs(live: Mapping[str, Tensor], spare: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the bytes of each storage on both sides, once, however many tensors of a model lie in it."""
    counterparts: dict[object, Tensor] = {}
    pairs: dict[object, tuple[Tensor, Tensor]] = {}
    for path in dict.fromkeys([*live, *spare]):
        ours, theirs = live.get(path), spare.get(path)
        if ours is not None and theirs is not None and _address(ours) == _address(theirs):
            continue  # such as one table for all layers with the same rotary embedding
        if ours is None or theirs is None or not _fits(ours, theirs):
            raise EngineError(
                f"the loaded draft does not match the serving one: {path} is {_named(theirs)}, "
                f"expected {_named(ours)}"
            )
        for one, other in ((ours, theirs), (theirs, ours)):
            if _address(counterparts.setdefault(_address(one), other)) != _address(other):
                raise EngineError(
                    f"the loaded draft does not match the serving one: {path} shares other memory"
                )
        pairs[_address(ours)] = _bytes(ours), _bytes(theirs)
    return list(pairs.values())


def _fits(ours: Tensor, theirs: Tensor) -> bool:
    same = (ours.shape, ours.dtype, ours.device, ours.stride(), ours.storage_offset())
    return same == (
        theirs.shape,
        theirs.dtype,
        theirs.device,
        theirs.stride(),
        theirs.storage_offset(),
    ) and len(_bytes(ours)) == len(_bytes(theirs))


def _named(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _scratch(parts: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    sizes: dict[torch.device, int] = {}
    for part in parts:
        sizes[part.device] = max(sizes.get(part.device, 0), min(len(part), _SPAN_BYTES))
    return {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes.items()}
