"""ExchangedSlot: a draft's slot with two models of one architecture, whose contents are exchanged in place."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import torch

from spec_core.errors import EngineError
from spec_kit.weight_sync.draft_slot import DraftSlot
from spec_kit.weight_sync.tensor_exchange import (
    TornDraftError,
    plain_tensors,
    storage_address,
    storage_addresses,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import Tensor, nn

    from spec_kit.weight_sync.draft_slot import DraftLayout
    from spec_kit.weight_sync.tensor_exchange import Address, Exchange

log = logging.getLogger(__name__)

_TORN = 70
"""Exit code of a process whose draft is half of each version."""


class ExchangedSlot(DraftSlot):
    """The live model of one rank, which the engine has made, and a spare that no forward pass ever runs.

    An engine says how the spare is made and loaded, and which tensors of each are the draft's own.
    """

    def __init__(self, device: torch.device, layout: DraftLayout, target: nn.Module) -> None:
        """Hold a draft on ``device``; ``layout`` is that of the folder it was started with.

        What it shares with ``target`` is not its own.
        """
        self._device, self._layout, self._target = device, layout, target
        self._exchange: Exchange | None = None
        self._places: WeakKeyDictionary[nn.Module, tuple[dict[str, Address], frozenset[Address]]] = (
            WeakKeyDictionary()
        )
        """Addresses of each copy's tensors when the target was looked up, and those of the target."""

    @property
    def device(self) -> torch.device:
        """Return where the draft lies."""
        return self._device

    def layout(self) -> DraftLayout:
        """Return what an update must hold: what the engine was started with."""
        return self._layout

    def make_blank(self) -> None:
        """Do what ``load`` needs and may only be done between two steps of the engine; before each update.

        What it has queued on a device is done when it returns: ``load`` has another stream.
        """

    @abstractmethod
    def load_spare(self, weights: Iterator[tuple[str, Tensor]]) -> Exchange:
        """Load the spare and return the exchange with the live model; the update's thread calls it."""

    @abstractmethod
    def tensors(self, copy: Literal["live", "spare"]) -> Mapping[str, Tensor]:
        """Return the draft's own tensors in a copy, by path. Raise EngineError where there is no spare yet."""

    def own_tensors(self, model: nn.Module, lent: Collection[str] = ()) -> dict[str, Tensor]:
        """Return parameters, buffers and plain tensor attributes of a copy that are not the target's, by path.

        Attributes named in ``lent`` are left out, and what has no bytes. Where the target lies is looked up again
        where a tensor of the copy has moved: for a large target it takes 10 to 20 ms of Python, for which the engine
        would wait.
        """
        tensors = plain_tensors(model, lent)
        places = {path: storage_address(tensor) for path, tensor in tensors.items()}
        known, of_target = self._places.get(model, (None, frozenset()))
        if places != known:
            of_target = storage_addresses(self._target)
            self._places[model] = places, of_target
        return {path: tensor for path, tensor in tensors.items() if places[path] not in of_target}

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the spare."""
        self._exchange = None
        with torch.no_grad():
            self._exchange = self.load_spare(weights)

    def swap(self) -> None:
        """Exchange live and spare between two steps. A process whose draft would be half of each ends itself."""
        if self._exchange is None:
            raise EngineError("the spare holds no draft")
        try:
            self._exchange.run()
        except TornDraftError as error:
            log.critical("%s: %s", type(error).__name__, error)
            os._exit(_TORN)
