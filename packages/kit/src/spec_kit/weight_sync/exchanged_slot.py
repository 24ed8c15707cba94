"""ExchangedSlot is a DraftSlot that exchanges the contents of two models in place."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from spec_core.errors import EngineError
from spec_kit.weight_sync.draft_slot import DraftLayout, DraftSlot
from spec_kit.weight_sync.tensor_exchange import (
    Address,
    Exchange,
    TornDraftError,
    plain_tensors,
    storage_address,
    storage_addresses,
)

log = logging.getLogger(__name__)

_TORN = 70
"""Exit code of a process whose draft mixes two versions, because an exchange and its undo failed."""


class ExchangedSlot(DraftSlot):
    """The live model of one rank, which the engine has created, and a spare model that is never run.

    A subclass for each engine creates and loads the spare model, and returns the draft's tensors of each model.
    """

    def __init__(self, device: torch.device, layout: DraftLayout, target: nn.Module) -> None:
        """Create a slot on ``device``. ``layout``: layout of the draft folder that the engine started with.

        Tensors that the draft shares with ``target`` are not exchanged.
        """
        self._device = device
        self._layout = layout
        self._target = target
        self._exchange: Exchange | None = None
        self._addresses: WeakKeyDictionary[nn.Module, tuple[dict[str, Address], frozenset[Address]]] = (
            WeakKeyDictionary()
        )
        """Model -> addresses of its tensors, and of the target's tensors, when they were last looked up."""

    @property
    def device(self) -> torch.device:
        """Return the device of the draft."""
        return self._device

    def layout(self) -> DraftLayout:
        """Return the layout of the draft with which the engine was started, which every update must match."""
        return self._layout

    def make_blank(self) -> None:
        """Do the part of ``load`` that is only allowed between two engine steps; called before each update.

        This method synchronizes with the device before it returns, because ``load`` uses another stream.
        """

    @abstractmethod
    def load_spare(self, weights: Iterator[tuple[str, Tensor]]) -> Exchange:
        """Load the spare model, and return the Exchange with the live model; called on the update's thread."""

    @abstractmethod
    def tensors(self, copy: Literal["live", "spare"]) -> Mapping[str, Tensor]:
        """Return the draft's tensors in one model, by path. Raise EngineError if there is no spare model yet."""

    def own_tensors(self, model: nn.Module, lent: Collection[str] = ()) -> dict[str, Tensor]:
        """Return, by path, the tensors of a model that it does not share with the target.

        They are parameters, buffers and tensor attributes, except attributes named in ``lent`` and tensors
        without bytes. The target's addresses are looked
        up again only if a tensor of the model has moved, because for a large target this blocks the engine for 10
        to 20 ms.
        """
        tensors = plain_tensors(model, lent)
        addresses = {path: storage_address(tensor) for path, tensor in tensors.items()}
        known, of_target = self._addresses.get(model, (None, frozenset()))
        if addresses != known:
            of_target = storage_addresses(self._target)
            self._addresses[model] = addresses, of_target
        return {path: tensor for path, tensor in tensors.items() if addresses[path] not in of_target}

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the tensors of an update into the spare model."""
        self._exchange = None
        with torch.no_grad():
            self._exchange = self.load_spare(weights)

    def swap(self) -> None:
        """Exchange the live and spare models. Exit the process if this fails and cannot be undone."""
        if self._exchange is None:
            raise EngineError("the spare holds no draft")
        try:
            self._exchange.run()
        except TornDraftError as error:
            log.critical("%s: %s", type(error).__name__, error)
            os._exit(_TORN)
