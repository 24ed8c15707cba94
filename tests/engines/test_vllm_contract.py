"""The vllm engine keeps the contract of engines, against Transformers driven by hand.

The tests share vLLM processes (``sharing.py``), but for the last one, which is about closing.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from spec_core.cpu.shared_memory_transport import SharedMemoryTransport
from spec_core.records import CaptureRequest, FeatureSchema
from spec_core.target_reader import read_target
from spec_core.testing import EngineSuite
from spec_trainer.engines.vllm.engine import VllmEngine

from .conftest import Transformer
from .vllm_here import needs_vllm

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_core import Engine, Transport
    from spec_core.testing.engine_suite import ReferenceTarget

pytestmark = needs_vllm

LIMIT_S = 60.0


class TestVllmEngine(EngineSuite):
    @pytest.fixture
    def transport(self) -> Transport:
        return SharedMemoryTransport()

    @pytest.fixture
    def new_engine(self, llama, sharing_engine) -> Callable[[Transport], Engine]:
        return lambda transport: sharing_engine(llama)

    @pytest.fixture
    def schema(self, engine: Engine) -> FeatureSchema:
        """More layers than the suite's: the ids of ``test_vllm_capture.py``, so that one vLLM serves both."""
        return FeatureSchema(layers=(0, 2, 4, 5, 8), hidden_size=engine.target.hidden_size, dtype="float32")

    @pytest.fixture
    def reference(self, llama: Path) -> ReferenceTarget:
        return Transformer(llama)

    @pytest.fixture
    def draft_folder(self, trained_draft) -> Path:
        return trained_draft("eagle3").folder


def test_a_closed_engine_leaves_nothing_but_what_it_has_sent(vllm_environment, llama, config, site) -> None:
    """E3 and E6, of an engine whose vLLM really ends."""
    schema = FeatureSchema(layers=(2,), hidden_size=64, dtype="float32")
    processes = set(psutil.Process().children(recursive=True))
    with SharedMemoryTransport().listen(schema, 1 << 20) as receiver:
        threads, files = threading.active_count(), set(Path(tempfile.gettempdir()).iterdir())
        with VllmEngine(config, read_target(llama), site) as engine:
            request = CaptureRequest(sample_id=7, input_ids=(5, 6), destination=receiver.address)
            engine.capture([request], schema).result(site.start_s)
            started = set(psutil.Process().children(recursive=True)) - processes
            assert len(started) >= 2  # vLLM and its engine core
        assert receiver.receive(LIMIT_S).sample_id == 7
        assert not [process for process in started if lives(process)]
        assert threading.active_count() == threads
    assert set(Path(tempfile.gettempdir()).iterdir()) <= files


def lives(process: psutil.Process) -> bool:
    """Dead ones may wait for whoever adopted them to take note."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
