"""Exchange the contents of two models of one architecture, in place: wholly, or not at all. Imports no vLLM.

Addresses stay, so that graphs that were captured with them stay valid. The bytes of one storage after the other go
by way of a scratch that was allocated before; whatever fails is undone from what each span notes about itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_core.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    _Fields = dict[str, object]

_SPAN_BYTES = 64 << 20
"""Most bytes that are exchanged at a time: the size of the scratch."""
_CACHE = "kv_cache"
"""vLLM's name for the memory of keys and values that it lends to an attention layer."""
PACKED = "cpu_linear"
"""vLLM's name for a layer's product with weights that were packed for the CPU; they are nowhere else."""
PACKED_DIGEST = "spec_packed_digest"
"""Our attribute of such a layer: the digest of the weights before they were packed."""


class TornDraftError(EngineError):
    """The exchange failed, and so did undoing it: the live draft is neither the old nor the new one."""


def owned_tensors(model: nn.Module, foreign: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers and plain tensor attributes of ``model``, by path.

    Left out are keys and values, what ``foreign`` holds as well, and what has no bytes.
    """
    theirs = {_address(tensor) for _, tensor in _tensors_of(foreign)}
    return {
        path: tensor
        for path, tensor in _tensors_of(model)
        if not tensor.is_meta and tensor.untyped_storage().nbytes() and _address(tensor) not in theirs
    }


def packed_layers(model: nn.Module, foreign: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of ``model``, by path, whose weights were packed; without those that ``foreign`` has, too."""
    not_ours = set(foreign.modules())
    return {
        path: layer
        for path, layer in model.named_modules()
        if PACKED in layer.__dict__ and layer not in not_ours
    }


class Exchange:
    """The contents of a live model and of its spare, pair by pair."""

    def __init__(self, live: nn.Module, spare: nn.Module, foreign: nn.Module) -> None:
        """Pair what both models own, and allocate a scratch; ``foreign`` is a model with which live one shares parts.

        Raise EngineError where the models do not match. Nothing has changed then.
        """
        pairs = _storage_pairs(owned_tensors(live, foreign), owned_tensors(spare, foreign))
        scratch = _scratch([ours for ours, _ in pairs])
        self._steps: list[_Span | _Packed] = [
            _Span(ours, theirs, scratch[ours.device][: len(ours)])
            for pair in pairs
            for ours, theirs in zip(*(part.split(_SPAN_BYTES) for part in pair), strict=True)
        ]
        theirs = packed_layers(spare, foreign)
        self._steps += [_Packed(layer, theirs[path]) for path, layer in packed_layers(live, foreign).items()]
        self._devices = [device for device, part in scratch.items() if not part.is_cpu]

    @torch.inference_mode()
    def run(self) -> None:
        """Exchange everything, and wait for the device.

        What fails is undone and raised again; raise TornDraftError where that fails, too.
        """
        begun: list[_Span | _Packed] = []
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


class _Packed:
    """Weights of one layer that were packed for the CPU, on both sides, and their digests."""

    def __init__(self, live: nn.Module, spare: nn.Module) -> None:
        self._live, self._spare = live, spare
        self._before: tuple[_Fields, _Fields] | None = None

    def forget(self) -> None:
        self._before = None

    def exchange(self) -> None:
        self._before = live, spare = _packed_fields(self._live), _packed_fields(self._spare)
        _assign(self._live, spare)
        _assign(self._spare, live)

    def undo(self) -> None:
        if self._before is not None:
            live, spare = self._before
            _assign(self._live, live)
            _assign(self._spare, spare)


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


def _packed_fields(layer: nn.Module) -> _Fields:
    return {name: layer.__dict__.get(name) for name in (PACKED, PACKED_DIGEST)}


def _assign(layer: nn.Module, packed: _Fields) -> None:
    layer.__dict__.update(packed)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in {**module.__dict__, **module._parameters, **module._buffers}.items():
            if name != _CACHE:
                yield from _tensors_in(f"{path}.{name}", value)


def _tensors_in(path: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            if isinstance(entry, torch.Tensor):
                yield f"{path}.{index}", entry


def _address(tensor: Tensor) -> tuple[torch.device, int]:
    """Return where the tensor's storage lies: two tensors with one address share memory."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def _storage_pairs(live: Mapping[str, Tensor], spare: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the bytes of each storage on both sides, once, however many tensors of a model lie in it."""
    counterparts: dict[object, Tensor] = {}
    pairs: dict[object, tuple[Tensor, Tensor]] = {}
    for path in dict.fromkeys([*live, *spare]):
        ours, theirs = live.get(path), spare.get(path)
        if ours is not None and theirs is not None and _address(ours) == _address(theirs):
            continue  # vLLM gives layers with the same rotary embedding one table
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
