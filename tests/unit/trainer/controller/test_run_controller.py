"""The controller of a run, with a launcher that starts nothing."""

from __future__ import annotations

import time

import pytest

from spec_core import WorkerMessage
from spec_core.errors import DeadlineExceeded
from spec_trainer.controller.protocol import Ready
from spec_trainer.controller.run_controller import RunController, worker_specs
from spec_trainer.progress import StepProgress
from spec_trainer.stop_request import StopRequest


class Worker:
    """An engine that takes no captures, and a rank that takes everything."""

    def __init__(self, name: str) -> None:
        self.name = name

    def send(self, message) -> None:
        if message["kind"] == "Capture":
            raise DeadlineExceeded(f"{self.name}: the control channel was not read within 3 s")

    def watch(self) -> None: ...


class Launcher:
    """Every worker is ready at once, and says nothing more."""

    def start(self, workers):
        started = {spec.name: Worker(spec.name) for spec in workers}
        self.events = [
            WorkerMessage(worker, Ready(address=worker.name).to_json()) for worker in started.values()
        ]
        return started

    def check_hosts(self) -> None: ...

    def receive(self, deadline_s):
        if self.events:
            return self.events.pop(0)
        time.sleep(max(0.0, deadline_s - time.monotonic()))
        return None


def test_an_engine_to_which_no_capture_can_be_sent_ends_the_run(resolved, tmp_path):
    """At once, although the error comes from the callback of a future, which would swallow it."""
    spec = resolved("placement.kind=disaggregated")
    controller = RunController(spec, Launcher(), StopRequest(), StepProgress(1))
    with pytest.raises(DeadlineExceeded, match=r"^engine-0: the control channel was not read within 3 s$"):
        controller.run(list(worker_specs(spec, tmp_path)))
