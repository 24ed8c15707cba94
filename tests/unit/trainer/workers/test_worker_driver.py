"""The driver of a run by workers, with a launcher that starts nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.trainer.workers.played_workers import Launcher, Worker, killed, run, said, the_end

from spec_core.errors import DeadlineExceeded, PeerLost
from spec_trainer.base.stop_request import StopRequest
from spec_trainer.workers.protocol import Captured, Exported, Finished, Ready, StepDone, Trained
from spec_trainer.workers.run_driver import RankTask


class StoppedWorker(Worker):
    """Reads nothing, if it is an engine."""

    def send(self, message) -> None:
        super().send(message)
        if self.name == "engine-0":
            raise DeadlineExceeded(f"{self.name}: the control channel was not read within 3 s")


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
