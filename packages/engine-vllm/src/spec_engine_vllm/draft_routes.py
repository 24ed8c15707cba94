"""DraftRoutes is the HTTP middleware that a user's ``vllm serve`` loads by ``--middleware``."""

from __future__ import annotations

from typing import Any, ClassVar

from spec_engine_vllm.acceptance_counts import rounds_of
from spec_engine_vllm.prefix_salt import SALTED_PATHS, Receive, salted
from spec_engine_vllm.vllm_answers import keep_answers
from spec_engine_vllm.vllm_ranks import VllmRanks
from spec_kit.hosting import DraftMiddleware


class DraftRoutes(DraftMiddleware):
    """The HTTP middleware that serves draft updates. vLLM creates one instance for its application."""

    sleep_path: ClassVar[str] = "/sleep"
    keeps_requests: ClassVar[bool] = True

    def find_ranks(self, scope: dict[str, Any]) -> VllmRanks:
        """Return the ranks of the engine client that vLLM's application holds."""
        llm = scope["app"].state.engine_client
        if self.live_requests is not None:
            keep_answers(llm, self.live_requests)
        return VllmRanks(llm, rounds_of(llm))

    async def renewed(self, path: str, receive: Receive) -> Receive:
        """Return ``receive``, or a wrapper that adds a salt to requests if a revert has occurred.

        A request with the salt shares no cached prefix with earlier requests.
        """
        reverted = None if self.ranks is None else self.ranks.last_revert
        if reverted is None or path not in SALTED_PATHS:
            return receive
        return await salted(receive, f"draft-{reverted.fence}-{reverted.number}")
