"""DraftRank runs draft updates in one rank of an engine's program; arguments and results are strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core import ServingStatus, UpdateId, UpdateRequest
from spec_core.errors import EngineError, SpecError
from spec_kit.hosting.backend_search import backend_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spec_core import WeightTransport
    from spec_kit.weight_sync import ExchangedSlot, UpdateReceiver


class DraftRank:
    """Receives draft updates in one rank. The spare copy is allocated at ``open`` or the first update."""

    def __init__(self, make_slot: Callable[[], ExchangedSlot], rank: int) -> None:
        """Call ``make_slot`` when the slot is first needed; it may raise EngineError."""
        self._make_slot = make_slot
        self._rank = rank
        self._parts: tuple[ExchangedSlot, Mapping[str, WeightTransport]] | None = None
        self._receiver: UpdateReceiver | None = None

    def answer(self, call: str, argument: str = "") -> dict[str, str]:
        """Execute a call; return ``status``, this rank's status as JSON, or ``refused``, why it is refused.

        ``call`` is ``prepare`` (argument: an UpdateRequest as JSON), ``commit``, ``revert`` or ``abort`` (argument:
        an UpdateId as JSON), ``open``, ``status`` or ``forget``. It must come between two steps of the engine.
        ``open`` allocates everything that the first ``prepare`` would otherwise have to allocate.
        """
        try:
            return {"status": self._call(call, argument).model_dump_json()}
        except (SpecError, RuntimeError) as error:  # RuntimeError: torch's, such as out of memory
            return {"refused": str(error)}

    def forget(self) -> None:
        """Record that no pushed version is served any more; afterwards the draft's memory may be freed."""
        if self._receiver is not None:
            self._receiver.forget()

    def _call(self, call: str, argument: str) -> ServingStatus:
        if call == "prepare":
            request = UpdateRequest.decode(argument)
            return self._opened(request.update.group).prepare(request)
        if call == "forget":
            self.forget()
        if call == "open":
            self._open()
        receiver = self._receiver
        if call in ("open", "status", "forget"):
            return ServingStatus() if receiver is None else receiver.status()
        if receiver is None:
            raise EngineError("no update was ever prepared")
        act = {"commit": receiver.commit, "revert": receiver.revert, "abort": receiver.abort}[call]
        return act(UpdateId.decode(argument))

    def _opened(self, group: str) -> UpdateReceiver:
        """Return the UpdateReceiver, which is created for the update group of the first update."""
        from spec_kit.weight_sync import UpdateReceiver

        slot, transports = self._open()
        if self._receiver is None:
            self._receiver = UpdateReceiver(slot, transports, group=group, rank=self._rank)
        return self._receiver

    def _open(self) -> tuple[ExchangedSlot, Mapping[str, WeightTransport]]:
        """Return the slot, ready for the next update, and the transports by which updates may arrive."""
        if self._parts is None:
            from spec_kit.weight_sync import open_weight_transports

            slot = self._make_slot()
            self._parts = slot, open_weight_transports(backend_for(slot.device.type))
        self._parts[0].make_blank()
        return self._parts
