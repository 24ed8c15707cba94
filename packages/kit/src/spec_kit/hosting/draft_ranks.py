"""DraftRanks: the ranks of one program as one replica, for its frontend: whatever one rank does, all do, or none."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from spec_core.draft_replica import ServingStatus, UpdateId, UpdateOrder
from spec_core.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_kit.hosting.modes import Fields

CALLS = {"prepare": UpdateOrder, "commit": UpdateId, "revert": UpdateId, "abort": UpdateId}
"""Type of the argument of each call but ``status``."""


class DraftRanks(ABC):
    """Calls the DraftRank of every process of one program. The methods run on the loop of its frontend."""

    def __init__(self) -> None:
        """Call nobody yet."""
        self._order = asyncio.Lock()
        self._num_ranks = 0
        """Ranks that hold the draft; 0 before they were asked."""
        self.served = ServingStatus()
        """Status of the replica when its ranks were last asked."""
        self.last_revert: UpdateId | None = None
        """The update that was last reverted, as far as was asked."""

    @abstractmethod
    async def answers(self, name: str, argument: str) -> Sequence[Fields]:
        """Return what ``DraftRank.answer`` returns on each rank. Raise EngineError where no rank has a draft."""

    @abstractmethod
    def acceptance(self) -> Fields:
        """Return what was counted since the draft last changed, by the names of AcceptanceCounters."""

    @abstractmethod
    def count_anew(self) -> None:
        """Count from now on: the draft has changed."""

    async def call(self, name: str, argument: str = "") -> Fields:
        """Return the ``status`` after a call, how many ``ranks`` there are, and ``acceptance``.

        Raise EngineError where a rank has refused; then no rank serves what this call was about.
        """
        from spec_kit.weight_sync import combined

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
        """Commit on all ranks or on none: each one could, when it was asked first, and one that fails undoes all.

        One alone checks it by itself; each question waits for a step of the engine.
        """
        update = UpdateId.decode(argument)
        for rank, status in enumerate([] if self._num_ranks == 1 else await self._each("status")):
            if status.update != update or status.state not in ("received", "committed"):
                raise EngineError(
                    f"update {update.number} cannot be committed: {_account(rank, status, update)}"
                )
        answers = await self.answers("commit", argument)
        if refused := _first_refusal(answers):
            await self.answers("revert", argument)  # those that have committed
            raise EngineError(refused)
        return _statuses(answers)

    async def _each(self, name: str, argument: str = "") -> list[ServingStatus]:
        answers = await self.answers(name, argument)
        if refused := _first_refusal(answers):
            raise EngineError(refused)
        return _statuses(answers)


def _account(rank: int, status: ServingStatus, update: UpdateId) -> str:
    """Return why a rank could not commit an update; the reasons of another update are none of its own."""
    if status.update != update:
        return f"at rank {rank} another update has taken its place"
    reason = f" ({status.reason})" if status.reason else ""
    return f"rank {rank} is {status.state}{reason}"


def _first_refusal(answers: Sequence[Fields]) -> str | None:
    return next((answer["refused"] for answer in answers if "refused" in answer), None)


def _statuses(answers: Sequence[Fields]) -> list[ServingStatus]:
    return [ServingStatus.decode(answer["status"]) for answer in answers]
