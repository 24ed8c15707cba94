"""When the draft of a run is measured, and which record says what came of it."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spec_trainer.push.live_measurements import LiveMeasurements
from spec_trainer.run.directory import RunDirectory

LAST = 25


class Run:
    """A run of 25 steps that measures every 10; the test says when a measurement is over."""

    def __init__(self) -> None:
        self.exported: list[str] = []
        self.futures: list[Future[dict[str, Any]]] = []
        config = SimpleNamespace(train=SimpleNamespace(serve_every=10), data=None)
        spec = SimpleNamespace(
            config=config,
            schedule=SimpleNamespace(total_steps=LAST),
            directory=RunDirectory(Path("run")),
            target=None,
        )
        self.rank_0 = LiveMeasurements(spec, self.measure)
        self.rank_1 = LiveMeasurements(spec, None)

    def export(self, target: object, folder: Path, chat: object) -> None:
        self.exported.append(folder.name)

    def measure(self, version: int, folder: Path) -> Future[dict[str, Any]]:
        self.futures.append(Future())
        if version != 10:  # the others are over at once
            self.over(1 + version / 10)
        return self.futures[-1]

    def over(self, tau: float) -> None:
        version = int(self.exported[-1].removeprefix("draft-"))
        figures = {"serving_version": version, "serving_acceptance_length": tau, "serving_tokens": 5}
        self.futures[-1].set_result(figures)


def test_records_after_a_measurement_keep_its_version_and_length():
    run, records = Run(), {}
    for done in range(1, LAST + 1):
        for rank in (run.rank_1, run.rank_0):
            if rank.is_due(done):
                rank.begin(done, run)
        if done == 14:
            run.over(1.5)
        assert run.rank_1.new_fields() == {}
        records[done] = run.rank_0.new_fields()
    assert run.exported == ["draft-10"] * 2 + ["draft-20"] * 2 + ["draft-25"] * 2
    assert not any(records[done] for done in range(1, 14))
    carried = {"serving_version": 10, "serving_acceptance_length": 1.5}
    assert records[14] == {**carried, "serving_tokens": 5}
    assert all(records[done] == carried for done in range(15, 20))
    assert [records[done].get("serving_tokens") for done in (19, 20, 21, 24, 25)] == [None, 5, None, None, 5]
    assert records[25]["serving_version"] == 25
