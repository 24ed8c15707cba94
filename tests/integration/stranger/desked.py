"""An engine whose features take the way of those of vLLM and SGLang: over the capture desk and the outlet."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path  # noqa: TC003 (pydantic reads DeskedConfig's annotations)
from typing import TYPE_CHECKING, Any, ClassVar

from spec_backend_cpu.backend import CpuBackend
from spec_core.engine import EngineContext
from spec_core.hosting.capture_desk import CaptureDesk
from spec_core.hosting.capture_outlet import CaptureOutlet
from spec_core.records import CaptureRequest
from spec_engine_hf.engine import HfConfig, HfEngine

if TYPE_CHECKING:
    from spec_core.records import FeatureSample, FeatureSchema

LIMIT_S = 60.0


class DeskedConfig(HfConfig):
    worker_comes_with: Path
    """Until this file is there, the desk hears whoever comes: a real engine's worker takes its time to start."""


class DeskedEngine(HfEngine):
    """Both ends are in this process; they know each other by the desk's address alone."""

    name: ClassVar[str] = "desked"
    Config: ClassVar = DeskedConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._link = ExitStack()
        self._desk: CaptureDesk | None = None
        self._outlet: CaptureOutlet

    def close(self) -> None:
        super().close()
        self._link.close()

    def _sender(self, destination: str, schema: FeatureSchema) -> Any:
        if self._desk is None:
            backend = CpuBackend(CpuBackend.Config())
            context = EngineContext(backend=backend, placement="disaggregated", peer_s=LIMIT_S)
            self._desk = self._link.enter_context(CaptureDesk(context, schema, LIMIT_S))
            self._await_worker()
            self._outlet = self._link.enter_context(CaptureOutlet(self._desk.address, LIMIT_S))
            assert self._desk.wait_connected(LIMIT_S)
        return destination

    def _send(self, sender: Any, sample: FeatureSample) -> None:
        assert self._desk is not None
        ids = tuple(sample.input_ids.tolist())
        request = CaptureRequest(request_id=sample.request_id, input_ids=ids, destinations=(sender,))
        (key,), done = self._desk.expect([request])
        self._outlet.deliver(key, ids, sample.hidden_TNH)
        done.result(LIMIT_S)

    def _await_worker(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not self.config.worker_comes_with.exists():
            assert time.monotonic() < deadline, "nobody has come to the desk"
            time.sleep(0.02)
