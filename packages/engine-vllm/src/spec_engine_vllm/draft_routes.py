"""DraftRoutes: the middleware for a ``vllm serve`` that a user has started, by ``--middleware``."""

from __future__ import annotations

from typing import Any, ClassVar

from spec_core.hosting import DraftMiddleware
from spec_engine_vllm.acceptance_counts import rounds_of
from spec_engine_vllm.draft_ranks import VllmRanks


class DraftRoutes(DraftMiddleware):
    """The middleware; vLLM makes one for its application."""

    sleep_path: ClassVar[str] = "/sleep"

    def find_ranks(self, scope: dict[str, Any]) -> VllmRanks:
        """Return the ranks of the engine client that vLLM keeps in its application."""
        llm = scope["app"].state.engine_client
        return VllmRanks(llm, rounds_of(llm))
