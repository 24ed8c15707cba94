"""DraftRank: one rank of an engine's program in updates of its draft, for calls whose values are plain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.draft_replica import ServingStatus, UpdateId, UpdateOrder
from spec_core.errors import EngineError, SpecError
from spec_core.hosting.backend_search import backend_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core.weight_sync import ExchangedSlot, UpdateReceiver


class DraftRank:
    """Takes part from the first update on: a draft without updates costs no memory twice."""

    def __init__(self, make_slot: Callable[[], ExchangedSlot], rank: int) -> None:
        """Make the slot by ``make_slot`` when it is needed; it may raise EngineError."""
        self._make_slot, self._rank = make_slot, rank
        self._updates: tuple[ExchangedSlot, UpdateReceiver] | None = None

    def answer(self, call: str, argument: str = "") -> dict[str, str]:
        """Return this rank's ``status`` after a call, or the reason why it is ``refused``.

        ``call`` is ``prepare``, with an UpdateOrder as JSON, ``commit``, ``revert`` or ``abort``, with an UpdateId,
        ``status`` or ``forget``. It must come between two steps of the engine.
        """
        try:
            return {"status": self._call(call, argument).model_dump_json()}
        except (SpecError, RuntimeError) as error:  # RuntimeError: torch's, such as out of memory
            return {"refused": str(error)}

    def forget(self) -> None:
        """Note that nothing that was pushed is served any more; then the draft's memory may be given up."""
        if self._updates is not None:
            self._updates[1].forget()

    def _call(self, call: str, argument: str) -> ServingStatus:
        if call == "prepare":
            order = UpdateOrder.decode(argument)
            slot, receiver = self._begun(order.update.group)
            slot.make_blank()
            return receiver.prepare(order)
        if call == "forget":
            self.forget()
        if call in ("status", "forget"):
            return ServingStatus() if self._updates is None else self._updates[1].status()
        if self._updates is None:
            raise EngineError("no update was ever prepared")
        receiver = self._updates[1]
        act = {"commit": receiver.commit, "revert": receiver.revert, "abort": receiver.abort}[call]
        return act(UpdateId.decode(argument))

    def _begun(self, group: str) -> tuple[ExchangedSlot, UpdateReceiver]:
        if self._updates is None:
            from spec_core.weight_sync import UpdateReceiver, open_weight_transports

            slot = self._make_slot()
            transports = open_weight_transports(backend_for(slot.device.type))
            self._updates = slot, UpdateReceiver(slot, transports, group=group, rank=self._rank)
        return self._updates
