"""The driver of a run by workers, with a launcher that starts nothing."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spec_core import WorkerEnded, WorkerMessage
from spec_core.errors import DeadlineExceeded, HostLost, NoDevices, PeerLost, RunError
from spec_trainer.base.progress import StepProgress
from spec_trainer.base.stop_request import StopRequest
from spec_trainer.workers.protocol import Captured, Exported, Failed, Finished, Ready, StepDone, Trained
from spec_trainer.workers.run_driver import RankTask
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


class StoppedWorker(Worker):
    """Reads nothing, if it is an engine."""

    def send(self, message) -> None:
        super().send(message)
        if self.name == "engine-0":
            raise DeadlineExceeded(f"{self.name}: the control channel was not read within 3 s")


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


@pytest.mark.parametrize("worker_type", [Worker, StoppedWorker])
def test_what_a_lost_engine_was_given_is_captured_anew_by_the_one_in_its_place(
    resolved, tmp_path, worker_type
):
    def script(launcher):
        old = launcher.workers["engine-0"]
        assert old.captures
        yield killed(old)
        yield said(old, Captured(0))  # kept while the cause was looked for
        new = launcher.workers["engine-0"]
        assert (launcher.replaced, new.captures) == (["engine-0"], [])
        yield said(new, Ready())
        assert [one["samples"] for one in new.captures] == [one["samples"] for one in old.captures]
        for capture in new.captures:
            yield said(new, Captured(capture["batch"]))
        yield from the_end(launcher)

    (entry,) = run(resolved, tmp_path, Launcher(script, worker_type))
    assert (entry["worker"], entry["step"]) == ("engine-0", 0)
    assert entry["cause"] == "engine-0 was killed by signal 9; see LOG"


def test_samples_of_a_rank_without_the_run_directory_are_written_for_it(resolved, tmp_path):
    file = tmp_path / "out/logs/trained-1.jsonl"
    rows = [{"step": step, "samples": [step]} for step in (1, 2, 3)]

    def script(launcher):
        file.write_text(json.dumps(rows[0]) + "\n")
        for row in rows[1:]:
            yield said(launcher.workers["trainer-0"], Trained(1, row))
        yield from the_end(launcher)

    run(resolved, tmp_path, Launcher(script))
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows


def test_a_rank_is_answered_for_every_export_even_if_the_run_is_to_stop(resolved, tmp_path):
    stop, versions = StopRequest(), []

    def script(launcher):
        rank = launcher.workers["trainer-0"]
        for version in (1, 2):
            yield said(rank, Exported(version, "draft"))
            assert rank.kinds.count("Measured") == version
        yield from the_end(launcher)

    def measure(version, folder):
        versions.append(version)
        stop.requested = True
        return {"serving_version": version}

    run(
        resolved,
        tmp_path,
        Launcher(script),
        work=lambda spec, driver: driver.train(spec, measure=measure),
        stop=stop,
    )
    assert versions == [1]


def test_in_a_run_that_decodes_an_engine_that_comes_later_is_told_its_cycle(resolved, tmp_path):
    def script(launcher):
        yield said(launcher.workers["trainer-0"], Ready(address="trainer-0"))
        old = launcher.workers["engine-0"]
        assert old.kinds[:2] == ["TrainCycle", "Capture"]
        yield killed(old)
        yield said(launcher.workers["engine-0"], Ready())
        assert launcher.workers["engine-0"].kinds == old.kinds
        yield said(launcher.workers["trainer-0"], Finished())
        yield killed(launcher.workers["decoder-0"])

    keys = ("decode.every=2", "decode.max_new_tokens=8", "train.push_every=2")
    with pytest.raises(PeerLost, match="decoder-0 was killed"):
        run(resolved, tmp_path, Launcher(script), *keys, work=one_cycle_and_a_draft)


def one_cycle_and_a_draft(spec, driver):
    driver.train(spec, {"cycle": 0})
    driver.serve(2, Path("draft"))


def following(resolved):
    """The same run, as one that follows live requests."""

    def resolve(*keys):
        spec = resolved(*keys)
        follow = spec.config.follow.model_copy(update={"servers": ("http://127.0.0.1:1",)})
        return replace(spec, config=spec.config.model_copy(update={"follow": follow}))

    return resolve


@pytest.mark.parametrize("worker_type", [Worker, StoppedWorker])
def test_a_task_is_performed_on_tokens_of_messages_even_if_an_engine_is_lost(resolved, tmp_path, worker_type):
    steps, paused, results = [], [], []

    def script(launcher):
        rank, old = launcher.workers["trainer-0"], launcher.workers["engine-0"]
        assert rank.kinds == ["Perform"]
        yield said(rank, Ready(address="trainer-0"))
        assert old.kinds[:2] == ["Perform", "Capture"]
        yield killed(old)
        yield said(launcher.workers["engine-0"], Ready())
        assert launcher.workers["engine-0"].kinds == old.kinds
        yield said(rank, StepDone(1))
        assert (paused, rank.kinds[-1]) == ([1], "Start")
        yield None
        assert (paused, rank.kinds[-1]) == ([1], "Proceed")
        yield said(rank, Finished(result={"found": [3]}))
        yield killed(rank)  # between two tasks it is still needed

    def pause(should_stop, sleep):
        assert not should_stop()
        paused.append(1)
        sleep(0.0)

    def work(spec, driver):
        part = spec.cycle(spec.dataset, range(2))
        task = RankTask(entry="package.module:name", arguments={"drafts": []})
        results.append(driver.perform(task, part, {"requests": 7}, pause))
        steps.append(driver.done_steps)
        driver.wait(60.0)

    with pytest.raises(PeerLost, match="trainer-0 was killed"):
        run(following(resolved), tmp_path, Launcher(script, worker_type), work=work)
    assert (results, steps) == ([{"found": [3]}], [1])


def test_an_engine_lost_while_a_task_loads_gets_captures_when_it_is_ready(resolved, tmp_path):
    def script(launcher):
        rank = launcher.workers["trainer-0"]
        yield said(rank, Ready(address="trainer-0"))
        yield said(rank, Finished())
        yield killed(launcher.workers["engine-0"])
        yield said(rank, Ready(address="trainer-0"))
        new = launcher.workers["engine-0"]
        assert new.kinds == []
        yield said(new, Ready())
        assert (new.kinds[:2], rank.kinds[-1]) == (["Perform", "Capture"], "Start")
        yield killed(rank)

    def work(spec, driver):
        for _ in range(2):
            driver.perform(RankTask(entry="package.module:name"), spec.cycle(spec.dataset, range(2)))

    with pytest.raises(PeerLost, match="trainer-0 was killed"):
        run(following(resolved), tmp_path, Launcher(script), work=work)


def test_an_engine_that_reports_an_error_is_replaced_and_its_end_is_no_failure(resolved, tmp_path):
    def script(launcher):
        old = launcher.workers["engine-0"]
        yield said(old, Failed("EngineError", "the program died", usage=False))
        yield WorkerEnded(old, "ended with exit code 1")
        yield None  # no cause comes
        yield said(launcher.workers["engine-0"], Ready())
        yield killed(launcher.workers["engine-0"])
        yield from the_end(launcher)

    entries = run(resolved, tmp_path, Launcher(script))
    assert [entry["cause"].partition(";")[0] for entry in entries] == [
        "engine-0: EngineError: the program died",
        "engine-0 was killed by signal 9",
    ]


@pytest.mark.parametrize(
    ("tries", "told"),
    [
        (0, r"^engine-0 was killed by signal 9; see LOG$"),
        (
            2,
            r"^engine-0 was killed by signal 9; see LOG; engine.replacements=2 allows no other replacement in a day$",
        ),
    ],
)
def test_an_engine_that_dies_again_and_again_ends_the_run_with_the_last_cause(
    resolved, tmp_path, tries, told
):
    def script(launcher):
        while True:
            yield killed(launcher.workers["engine-0"])

    launcher = Launcher(script)
    with pytest.raises(RunError, match=told):
        run(resolved, tmp_path, launcher, f"engine.replacements={tries}")
    assert len(launcher.replaced) == tries


def test_an_engine_that_cannot_be_started_again_or_is_late_is_one_more_try(resolved, tmp_path):
    def script(launcher):
        yield killed(launcher.workers["engine-0"])

    launcher = Launcher(script, refusals=1)
    words = r"^engine-0 not ready within timeouts.start_s=0.5 s; engine.replacements=2 allows no other replacement"
    with pytest.raises(RunError, match=words):
        run(resolved, tmp_path, launcher, "engine.replacements=2", "timeouts.start_s=0.5")
    assert launcher.replaced == ["engine-0", "engine-0"]


def test_engines_lost_together_come_back_after_many_failed_starts(resolved, tmp_path):
    def script(launcher):
        yield killed(launcher.workers["engine-0"])
        yield killed(launcher.workers["engine-1"])
        yield said(launcher.workers["engine-0"], Ready())
        yield said(launcher.workers["engine-1"], Ready())
        yield from the_end(launcher)

    launcher = Launcher(script, refusals=500)
    entries = run(resolved, tmp_path, launcher, "engine.replicas=2", "engine.replacements=1000")
    assert [entry["worker"] for entry in entries] == 501 * ["engine-0"] + ["engine-1"]


def test_nothing_is_expected_of_an_engine_that_waits_for_devices(resolved, tmp_path, monkeypatch):
    """Neither what it has said before, nor that the one in its place, lost while it loaded, is ready in time."""
    monkeypatch.setattr("spec_trainer.workers.workers._ROOM_CHECK_S", 0.01)

    def script(launcher):
        old = launcher.workers["engine-1"]
        yield killed(old)
        yield said(old, Captured(0))  # kept while the cause was looked for
        while (second := launcher.workers["engine-1"]) is old:
            yield None
        launcher.refusals = 10**9
        yield killed(second)
        late = time.monotonic() + 2.1
        while time.monotonic() < late:
            yield None
        launcher.refusals = 0
        while (third := launcher.workers["engine-1"]) is second:
            yield None
        yield said(third, Ready())
        yield from the_end(launcher)

    launcher = Launcher(script, refusals=2, refusal=NoDevices)
    keys = ("engine.replicas=2", "engine.replacements=2", "timeouts.start_s=2")
    entries = run(resolved, tmp_path, launcher, *keys)
    assert [entry["cause"] for entry in entries] == 2 * ["engine-1 was killed by signal 9; see LOG"]


def test_without_devices_for_a_lost_engine_the_run_goes_on_until_there_are_some(
    resolved, tmp_path, monkeypatch
):
    """Every try but the first follows a look for devices, which is no failure."""
    monkeypatch.setattr("spec_trainer.workers.workers._ROOM_CHECK_S", 0.01)

    def script(launcher):
        yield killed(launcher.workers["engine-1"])
        while len(launcher.replaced) < 4:
            yield None
        yield said(launcher.workers["engine-1"], Ready())
        yield from the_end(launcher)

    launcher = Launcher(script, refusals=3, refusal=NoDevices)
    keys = ("engine.replicas=2", "engine.replacements=1")
    (entry,) = run(resolved, tmp_path, launcher, *keys)
    assert entry["worker"] == "engine-1"
    assert launcher.replaced == 4 * ["engine-1"]


def test_where_no_engine_is_left_and_no_device_the_run_ends(resolved, tmp_path, monkeypatch):
    monkeypatch.setattr("spec_trainer.workers.workers._ROOM_CHECK_S", 0.01)

    def script(launcher):
        yield killed(launcher.workers["engine-0"])

    launcher = Launcher(script, refusals=10**9, refusal=NoDevices)
    words = (
        r"^engine-0 cannot be started: no memory within timeouts.start_s=0.5 s, and no other engine is left$"
    )
    with pytest.raises(RunError, match=words):
        run(resolved, tmp_path, launcher, "timeouts.start_s=0.5")


def test_nothing_is_replaced_where_the_host_of_all_workers_is_lost(resolved, tmp_path):
    def script(launcher):
        yield WorkerEnded(launcher.workers["engine-0"], "was lost: HOST is gone", killed=True, host_lost=True)

    launcher = Launcher(script)
    with pytest.raises(HostLost, match=r"^engine-0 was lost: HOST is gone$"):
        run(resolved, tmp_path, launcher, "engine.replacements=3")
    assert launcher.replaced == []
    assert list(tmp_path.rglob("replacements.jsonl")) == []


def test_a_replacement_is_not_tried_again_once_the_host_of_all_workers_is_lost(resolved, tmp_path):
    def script(launcher):
        yield killed(launcher.workers["engine-0"])

    launcher = Launcher(script, refusals=10**9, refusal=HostLost)
    with pytest.raises(HostLost, match=r"^engine-0 cannot be started: no memory$"):
        run(resolved, tmp_path, launcher, "engine.replacements=3")
    assert launcher.replaced == ["engine-0"]


def test_no_trainer_is_replaced(resolved, tmp_path):
    def script(launcher):
        yield killed(launcher.workers["trainer-0"])

    with pytest.raises(PeerLost, match=r"^trainer-0 was killed"):
        run(resolved, tmp_path, Launcher(script))


def test_no_engine_is_replaced_before_the_run_has_begun(resolved, tmp_path):
    class Broken(Launcher):
        def start(self, workers):
            started = super().start(workers)
            self.events = [killed(started["engine-0"])]
            return started

    with pytest.raises(PeerLost, match=r"^engine-0 was killed by signal 9; see LOG$"):
        run(resolved, tmp_path, Broken(lambda launcher: iter(())))


def test_an_engine_that_is_not_ready_at_the_end_is_not_awaited(resolved, tmp_path):
    def script(launcher):
        yield killed(launcher.workers["engine-0"])
        yield said(launcher.workers["trainer-0"], Finished())
        yield WorkerEnded(launcher.workers["trainer-0"], "ended with exit code 0")

    assert len(run(resolved, tmp_path, Launcher(script))) == 1
