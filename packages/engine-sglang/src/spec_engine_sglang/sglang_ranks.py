"""SglangRanks treats all ranks of one SGLang as one replica; SglangRoutes adds HTTP routes to a user's SGLang server.

Both run in the process of SGLang's frontend.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

from spec_core.errors import EngineError
from spec_core.records import AcceptanceCounters
from spec_engine_sglang.scheduler_updates import ANSWER, request_id
from spec_engine_sglang.serving_capture import STATES, states_request_id
from spec_engine_sglang.sglang_answers import store_answers
from spec_kit.hosting import DraftMiddleware, DraftRanks, Fields


class SglangRanks(DraftRanks):
    """Sends calls about the draft to the scheduler of every rank of one SGLang."""

    def __init__(self, tokenizer_manager: Any) -> None:
        """Send calls through SGLang's tokenizer manager."""
        super().__init__()
        self._manager = tokenizer_manager
        self._counted = asdict(AcceptanceCounters())

    async def answers(self, name: str, argument: str) -> list[Fields]:
        """Return the answers of all ranks, and store the acceptance counters that they report."""
        state = await self._internal_state(request_id(name, argument), ANSWER)
        if not state["answers"]:
            raise EngineError(
                "this SGLang serves no draft with weights; start it with --speculative-algorithm"
            )
        self._counted = state["acceptance"]
        return state["answers"]

    async def states(self, asked: str) -> Fields | bytes:
        """Return the first rank's answer about captured states: their layout, some bytes, or a StatesLeftOut.

        ``asked``: a StatesRange as JSON, or an empty string for the layout.
        """
        answer = await self._internal_state(states_request_id(asked), STATES)
        if "refused" in answer:
            raise EngineError(answer["refused"])
        return answer.get("piece", answer)

    async def _internal_state(self, name: str, key: str) -> Any:
        """Ask the scheduler for its state by a request of id ``name``; return the part ``key`` of the answer."""
        from sglang.srt.managers.io_struct import GetInternalStateReq

        self._manager.auto_create_handle_loop()
        states = [
            output.internal_state.get(key)
            for output in await self._manager.get_internal_state_communicator(GetInternalStateReq(rid=name))
        ]
        if len(states) != 1:
            raise EngineError("this SGLang is data-parallel; start one server for each replica")
        if states[0] is None:
            raise EngineError("SGLang's scheduler runs without the plugin of spec-engine-sglang")
        return states[0]

    def acceptance(self) -> Fields:
        """Return the first rank's acceptance counters since the draft changed, as of its last answer."""
        return self._counted

    def count_anew(self) -> None:
        """Do nothing, because each scheduler resets its counters itself when the draft changes."""


class SglangRoutes(DraftMiddleware):
    """The HTTP middleware for an SGLang server that a user has started."""

    sleep_path: ClassVar[str] = "/release_memory_occupation"
    keeps_requests: ClassVar[bool] = True

    def __init__(self, app: Any, tokenizer_manager: Any) -> None:
        """Wrap ``app``."""
        super().__init__(app)
        self._manager = tokenizer_manager

    def find_ranks(self, scope: dict[str, Any]) -> SglangRanks:
        """Return the ranks of this server's SGLang."""
        if self.live_requests is not None:
            store_answers(self._manager, self.live_requests)
        return SglangRanks(self._manager)
