"""DraftRanks presents the ranks of one program as one replica: all ranks commit an update, or none."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from spec_core import ServingStatus, UpdateId, UpdateRequest
from spec_core.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_kit.hosting.modes import Fields

CALLS = {"prepare": UpdateRequest, "commit": UpdateId, "revert": UpdateId, "abort": UpdateId}
"""Name of a call with an argument -> type of the argument."""


class DraftRanks(ABC):
    """Calls the DraftRank of each process of one program, on the event loop of the program's frontend."""

    def __init__(self) -> None:
        """Start with an unknown number of ranks, which the first call finds out."""
        self._order = asyncio.Lock()
        self._num_ranks = 0
        """Number of ranks that hold the draft; 0 before the first call."""
        self.served = ServingStatus()
        """Status of the replica after the last call to its ranks."""
        self.last_revert: UpdateId | None = None
        """The update that was last reverted, according to the calls so far."""

    @abstractmethod
    async def answers(self, name: str, argument: str) -> Sequence[Fields]:
        """Return each rank's result of ``DraftRank.answer``. Raise EngineError if no rank has a draft."""

    @abstractmethod
    def acceptance(self) -> Fields:
        """Return the fields of AcceptanceCounters, counted since the draft last changed."""

    @abstractmethod
    def count_anew(self) -> None:
        """Reset the counters, because the draft has changed."""

    async def states(self, asked: str) -> Fields | bytes:
        """Return a StatesLayout's fields if ``asked`` is empty; else a piece of states or a StatesLeftOut.

        ``asked``: a StatesRange as JSON. Raise EngineError if this server captures no states, which is the default.
        """
        raise EngineError("this server's engine captures no states while it serves")

    async def call(self, name: str, argument: str = "") -> Fields:
        """Call all ranks; return ``status``, the number of ``ranks``, and the counters ``acceptance``.

        Raise EngineError if a rank has refused; then no rank serves the update of this call.
        """
        from spec_kit.weight_sync.receiver_replica import combined

        if name in CALLS:
            CALLS[name].decode(argument)
        async with self._order:
            statuses = await (self._commit(argument) if name == "commit" else self._each(name, argument))
        before, self.served = self.served, combined(statuses)
        self._num_ranks = len(statuses)
        if (before.version, before.digest) != (self.served.version, self.served.digest):
            self.count_anew()
        if self.served.state == "reverted":
            self.last_revert = self.served.update
        return {
            "status": self.served.model_dump(mode="json"),
            "ranks": len(statuses),
            "acceptance": self.acceptance(),
        }

    async def _commit(self, argument: str) -> list[ServingStatus]:
        """Commit on all ranks or on none; if the commit fails on one rank, it is reverted on all.

        With several ranks, their statuses are read first, to see whether all can commit. With one rank this
        call is left out, because each call waits for a step of the engine, and the rank checks the same
        itself.
        """
        update = UpdateId.decode(argument)
        for rank, status in enumerate([] if self._num_ranks == 1 else await self._each("status")):
            if status.update != update or status.state not in ("received", "committed"):
                raise EngineError(
                    f"update {update.number} cannot be committed: {_account(rank, status, update)}"
                )
        answers = await self.answers("commit", argument)
        if refused := _first_refusal(answers):
            await self.answers("revert", argument)  # on the ranks that have committed
            raise EngineError(refused)
        return _statuses(answers)

    async def _each(self, name: str, argument: str = "") -> list[ServingStatus]:
        answers = await self.answers(name, argument)
        if refused := _first_refusal(answers):
            raise EngineError(refused)
        return _statuses(answers)


def _account(rank: int, status: ServingStatus, update: UpdateId) -> str:
    """Return why a rank cannot commit ``update``; a reason that belongs to another update is left out."""
    if status.update != update:
        return f"at rank {rank} another update has taken its place"
    reason = f" ({status.reason})" if status.reason else ""
    return f"rank {rank} is {status.state}{reason}"


def _first_refusal(answers: Sequence[Fields]) -> str | None:
    return next((answer["refused"] for answer in answers if "refused" in answer), None)


def _statuses(answers: Sequence[Fields]) -> list[ServingStatus]:
    return [ServingStatus.decode(answer["status"]) for answer in answers]
