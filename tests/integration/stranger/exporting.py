"""An engine whose features take the way of those of vLLM and SGLang: by FeatureExporter."""

import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import CaptureRequest, FeatureSample, FeatureSchema
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.hosting import FeatureExporter
from spec_kit.hosting.capture_controller import CaptureController

LIMIT_S = 60.0


class ExportingConfig(HfConfig):
    worker_comes_with: Path
    """File without which the controller waits for a connection, as for a real engine's worker."""


class ExportingEngine(HfEngine):
    """Both ends are in this process; they know each other by the controller's address alone."""

    name: ClassVar[str] = "exporting"
    Config: ClassVar = ExportingConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._link = ExitStack()
        self._controller: CaptureController | None = None
        self._exporter: FeatureExporter

    def close(self) -> None:
        super().close()
        self._link.close()

    def _sender(self, destination: str, schema: FeatureSchema) -> Any:
        if self._controller is None:
            backend = CpuBackend(CpuBackend.Config())
            context = EngineContext(backend=backend, placement="disaggregated", peer_s=LIMIT_S)
            self._controller = self._link.enter_context(CaptureController(context, schema, LIMIT_S))
            self._await_worker()
            self._exporter = self._link.enter_context(FeatureExporter(self._controller.address, LIMIT_S))
            assert self._controller.wait_connected(LIMIT_S)
        return destination

    def _send(self, sender: Any, sample: FeatureSample) -> None:
        assert self._controller is not None
        ids = tuple(sample.input_ids.tolist())
        request = CaptureRequest(request_id=sample.request_id, input_ids=ids, destinations=(sender,))
        done: Future[None] = Future()
        (registered,) = self._controller.register([request], done)
        self._exporter.export(request.request_id, registered.destinations, ids, sample.hidden_TNH)
        done.result(LIMIT_S)

    def _await_worker(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not self.config.worker_comes_with.exists():
            assert time.monotonic() < deadline, "nobody has connected to the controller"
            time.sleep(0.02)
