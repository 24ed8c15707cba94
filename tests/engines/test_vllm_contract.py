"""The vllm engine keeps the contract of engines, against Transformers driven by hand.

The tests share vLLM processes (``sharing.py``); what a real end leaves is in ``test_vllm_capture.py``.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from spec_core import Engine, EngineContext
from spec_core.records import FeatureSchema
from spec_testing import EngineSuite, ReferenceTarget, TransformersTarget

from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states")]


class TestVllmEngine(EngineSuite):
    placement = "colocated"

    @pytest.fixture
    def context(self, vllm_context: EngineContext) -> EngineContext:
        return vllm_context

    @pytest.fixture
    def new_engine(self, llama, sharing_engine) -> Callable[[EngineContext], Engine]:
        return lambda context: sharing_engine(llama, context)

    @pytest.fixture
    def schema(self, engine: Engine) -> FeatureSchema:
        """More layers than the suite's: the ids of ``test_vllm_capture.py``, so that one vLLM serves both."""
        return FeatureSchema(layers=(0, 2, 4, 5, 8), hidden_size=engine.target.hidden_size, dtype="float32")

    @pytest.fixture
    def reference(self, llama: Path) -> ReferenceTarget:
        return TransformersTarget(llama)

    @pytest.fixture
    def draft_folder(self, trained_draft) -> Path:
        return trained_draft("eagle3").folder
