"""Ranks of vLLM that answer as a test says."""

import asyncio
from typing import Any

from spec_core import ServingStatus, UpdateId
from spec_engine_vllm.acceptance_counts import EngineTotals
from spec_engine_vllm.vllm_ranks import VllmRanks

UPDATE = UpdateId(group="default", fence=1, number=7)


NAME = UPDATE.model_dump_json()


COUNTED: dict[str, Any] = {"rounds": 5, "drafted": 15, "accepted": 6, "accepted_per_position": [4, 2, 0]}


class Ranks:
    """vLLM's engine client, with a worker for each entry of ``states``; ``refusing`` ranks raise at their commit."""

    def __init__(self, *states: str | None, refusing: tuple[int, ...] = ()) -> None:
        self.statuses = [
            None if state is None else ServingStatus(state=state, update=UPDATE) for state in states
        ]
        self.refusing = refusing
        self.calls: list[str] = []

    async def collective_rpc(self, method: str, args: tuple[str, str]) -> list[dict[str, str] | None]:
        assert method == "spec_draft"
        self.calls.append(args[0])
        return [self._answer(rank, *args) for rank in range(len(self.statuses))]

    def _answer(self, rank: int, call: str, argument: str) -> dict[str, str] | None:
        if (status := self.statuses[rank]) is None:
            return None
        if call == "commit" and rank in self.refusing:
            return {"refused": f"rank {rank} cannot"}
        ends = {
            "commit": "committed",
            "revert": "reverted",
            "abort": "aborted",
            "prepare": "prepared",
            "forget": "idle",
        }
        if call == "revert" and status.state != "committed":
            return {"refused": "nothing to revert"}
        if call in ends:
            version = 3 if call == "commit" else None
            self.statuses[rank] = status.model_copy(
                update={"state": ends[call], "version": version, "digest": "d" * bool(version)}
            )
        return {"status": self.statuses[rank].model_dump_json()}


def call(llm: object, name: str, argument: str = "") -> dict[str, Any]:
    return asyncio.run(VllmRanks(llm, EngineTotals()).call(name, argument))
