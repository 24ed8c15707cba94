"""Engines that are lost during a run by workers, and what takes their place."""

import time

import pytest
from tests.unit.trainer.workers.played_workers import Launcher, killed, run, said, the_end

from spec_core import WorkerEnded
from spec_core.errors import HostLost, NoDevices, PeerLost, RunError
from spec_trainer.workers.protocol import Captured, Failed, Finished, Ready


def an_engine_dies(launcher):
    yield killed(launcher.workers["engine-0"])


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
    launcher = Launcher(an_engine_dies, refusals=1)
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

    launcher = Launcher(an_engine_dies, refusals=10**9, refusal=NoDevices)
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
    launcher = Launcher(an_engine_dies, refusals=10**9, refusal=HostLost)
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
