"""VllmRanks: the ranks of one vLLM as one replica, for its frontend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_core.errors import EngineError
from spec_core.hosting import DraftRanks

if TYPE_CHECKING:
    from spec_core.hosting import Fields

EXTENSION = "spec_engine_vllm.worker_extension.WorkerExtension"
"""Value of vLLM's ``--worker-extension-cls``."""


class VllmRanks(DraftRanks):
    """Calls the extension of every worker of one vLLM."""

    def __init__(self, llm: Any) -> None:
        """Use vLLM's engine client."""
        super().__init__()
        self._llm = llm

    async def answers(self, name: str, argument: str) -> list[Fields]:
        """Return the answers of the workers that have a draft with weights."""
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

    def counters(self) -> Fields:
        """Return vLLM's own counters since its frontend started."""
        return speculation_counters()


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
