"""VllmRanks treats all ranks of one vLLM as one replica of the draft; vLLM's frontend uses it."""

from __future__ import annotations

from typing import Any

from spec_core.errors import EngineError
from spec_engine_vllm.acceptance_counts import AcceptanceCounts
from spec_kit.hosting import DraftRanks, Fields

EXTENSION = "spec_engine_vllm.worker_extension.WorkerExtension"
"""Value of vLLM's option ``--worker-extension-cls``."""


class VllmRanks(DraftRanks):
    """Calls the worker extension's methods in every worker of one vLLM."""

    def __init__(self, llm: Any, counts: AcceptanceCounts) -> None:
        """Use vLLM's engine client ``llm`` and the acceptance counters of its frontend."""
        super().__init__()
        self._llm = llm
        self._counts = counts

    async def answers(self, name: str, argument: str) -> list[Fields]:
        """Call ``spec_draft`` in all workers; return the answers of workers that have a draft with weights."""
        answers = await self._of_workers("spec_draft", name, argument)
        with_draft = [answer for answer in answers if answer is not None]
        if not with_draft:
            raise EngineError("this vLLM serves no draft with weights; start it with --speculative-config")
        return with_draft

    async def states(self, asked: str) -> Fields | bytes:
        """Return the first rank's answer about captured states: their layout, some bytes, or a StatesLeftOut.

        ``asked``: a StatesRange as JSON, or an empty string for the layout.
        """
        answers = await self._of_workers("spec_states", asked)
        answer = next(answer for answer in answers if answer is not None)
        if "refused" in answer:
            raise EngineError(answer["refused"])
        return answer.get("piece", answer)

    async def _of_workers(self, method: str, *args: str) -> list[Any]:
        try:
            return await self._llm.collective_rpc(method, args=args)
        except Exception as error:
            if method not in str(error):
                raise
            raise EngineError(f"vLLM was started without --worker-extension-cls {EXTENSION}") from error

    def acceptance(self) -> Fields:
        """Return the acceptance counters since the draft last changed."""
        return self._counts.counted()

    def count_anew(self) -> None:
        """Restart the acceptance counters."""
        self._counts.begin()
