"""A launcher whose workers are played by the test."""

import json
import time

from spec_core import WorkerEnded, WorkerMessage
from spec_core.errors import RunError
from spec_trainer.base.progress import StepProgress
from spec_trainer.base.stop_request import StopRequest
from spec_trainer.workers.protocol import Finished, Ready
from spec_trainer.workers.worker_driver import WorkerDriver
from spec_trainer.workers.worker_specs import worker_specs


class Worker:
    """Takes everything; remembers the captures."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.captures: list[dict] = []
        self.kinds: list[str] = []

    def send(self, message) -> None:
        self.kinds.append(message["kind"])
        if message["kind"] == "Capture":
            self.captures.append(message)

    def watch(self) -> None: ...


class Launcher:
    """Every worker is ready at once; ``script`` then yields events, given the launcher."""

    def __init__(self, script, worker_type=Worker, refusals=0, refusal=RunError) -> None:
        self.script = script(self)
        self.worker_type = worker_type
        self.refusals = refusals
        self.refusal = refusal
        self.workers: dict[str, Worker] = {}
        self.replaced: list[str] = []

    def start(self, workers):
        self.workers = {spec.name: self.worker_type(spec.name) for spec in workers}
        self.events = [said(worker, Ready(address=name)) for name, worker in self.workers.items()]
        return self.workers

    def replace(self, worker):
        self.replaced.append(worker.name)
        if self.refusals:
            self.refusals -= 1
            raise self.refusal(f"{worker.name} cannot be started: no memory")
        self.workers = {**self.workers, worker.name: Worker(worker.name)}
        return self.workers[worker.name]

    def check_hosts(self) -> None: ...

    def receive(self, deadline_s):
        if self.events:
            return self.events.pop(0)
        if (event := next(self.script, None)) is None:
            time.sleep(max(0.0, deadline_s - time.monotonic()))
        return event


def said(worker, message):
    return WorkerMessage(worker, message.to_json())


def killed(worker):
    return WorkerEnded(worker, "was killed by signal 9; see LOG", killed=True)


def the_end(launcher):
    yield said(launcher.workers["trainer-0"], Finished())
    for worker in launcher.workers.values():
        yield WorkerEnded(worker, "ended with exit code 0")


def train(spec, driver):
    driver.train(spec)


def run(resolved, tmp_path, launcher, *keys, work=train, stop=None):
    spec = resolved("placement.kind=disaggregated", *keys)
    spec.directory.logs.mkdir(parents=True, exist_ok=True)
    driver = WorkerDriver(spec, launcher, stop or StopRequest(), StepProgress(1))
    with driver.started(list(worker_specs(spec, tmp_path))):
        work(spec, driver)
    file = spec.directory.replacements
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
