"""DraftRanks: the ranks of one vLLM as one replica, for its frontend: whatever one rank does, all do, or none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from spec_core import ServingStatus, UpdateId, UpdateOrder
from spec_core.errors import EngineError
from spec_core.weight_sync import combined

if TYPE_CHECKING:
    from spec_core.hosting import Fields

EXTENSION = "spec_engine_vllm.worker_extension.WorkerExtension"
"""Value of vLLM's ``--worker-extension-cls``."""
CALLS = {"prepare": UpdateOrder, "commit": UpdateId, "revert": UpdateId, "abort": UpdateId}
"""Type of the argument of each call but ``status``."""


class DraftRanks:
    """Calls the extension of every worker of one vLLM. The methods run on the loop of vLLM's frontend."""

    def __init__(self, llm: Any) -> None:
        """Use vLLM's engine client."""
        self._llm = llm
        self._order = asyncio.Lock()
        self._counted: Fields = {}
        self._num_ranks = 0
        """Ranks that hold the draft; 0 before they were asked."""
        self.served = ServingStatus()
        """Status of the replica when its ranks were last asked."""

    async def call(self, name: str, argument: str = "") -> Fields:
        """Return the ``status`` after a call, how many ``ranks`` there are, and ``acceptance`` since the last commit.

        Raise EngineError where a rank has refused; then no rank serves what this call was about.
        """
        if name in CALLS:
            CALLS[name].decode(argument)
        async with self._order:
            statuses = await (self._commit(argument) if name == "commit" else self._each(name, argument))
        if name in ("commit", "revert"):
            self._counted = speculation_counters()
        self.served, self._num_ranks = combined(statuses), len(statuses)
        return {
            "status": self.served.model_dump(mode="json"),
            "ranks": len(statuses),
            "acceptance": self.acceptance(),
        }

    def acceptance(self) -> Fields:
        """Return vLLM's counters since the last commit or revert, by the names of AcceptanceCounters."""
        return _difference(speculation_counters(), self._counted)

    async def _commit(self, argument: str) -> list[ServingStatus]:
        """Commit on all ranks or on none: each one could, when it was asked first, and one that fails undoes all.

        One alone checks it by itself; each question waits for a step of the engine.
        """
        update = UpdateId.decode(argument)
        for rank, status in enumerate([] if self._num_ranks == 1 else await self._each("status")):
            if status.update != update or status.state not in ("received", "committed"):
                reason = f" ({status.reason})" if status.reason else ""
                raise EngineError(
                    f"update {update.number} cannot be committed: rank {rank} is {status.state}{reason}"
                )
        answers = await self._answers("commit", argument)
        if refused := _first_refusal(answers):
            await self._answers("revert", argument)  # those that have committed
            raise EngineError(refused)
        return _statuses(answers)

    async def _each(self, name: str, argument: str = "") -> list[ServingStatus]:
        answers = await self._answers(name, argument)
        if refused := _first_refusal(answers):
            raise EngineError(refused)
        return _statuses(answers)

    async def _answers(self, name: str, argument: str) -> list[dict[str, str]]:
        try:
            answers = await self._llm.collective_rpc("spec_draft", args=(name, argument))
        except Exception as error:
            if "spec_draft" not in str(error):
                raise
            raise EngineError(f"vLLM was started without --worker-extension-cls {EXTENSION}") from error
        with_draft = [answer for answer in answers if answer is not None]
        if not with_draft:
            raise EngineError("this vLLM serves no draft with weights; start it with --speculative-config")
        return with_draft


def speculation_counters() -> Fields:
    """Return vLLM's own counters since its frontend started, by the names of AcceptanceCounters."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    prefix = "vllm:spec_decode_num_"
    found = {metric.name.removeprefix(prefix): metric for metric in get_metrics_snapshot()}
    totals = {
        ours: found[theirs].value if theirs in found else 0
        for ours, theirs in (
            ("rounds", "drafts"),
            ("drafted", "draft_tokens"),
            ("accepted", "accepted_tokens"),
        )
    }
    positions = found.get("accepted_tokens_per_pos")
    return {**totals, "accepted_per_position": list(positions.values) if positions else []}


def _difference(now: Fields, before: Fields) -> Fields:
    if not before:
        return now
    totals = {name: now[name] - before[name] for name in ("rounds", "drafted", "accepted")}
    earlier = before["accepted_per_position"] or [0] * len(now["accepted_per_position"])
    positions = [new - old for new, old in zip(now["accepted_per_position"], earlier, strict=True)]
    return {**totals, "accepted_per_position": positions}


def _first_refusal(answers: list[dict[str, str]]) -> str | None:
    return next((answer["refused"] for answer in answers if "refused" in answer), None)


def _statuses(answers: list[dict[str, str]]) -> list[ServingStatus]:
    return [ServingStatus.decode(answer["status"]) for answer in answers]
