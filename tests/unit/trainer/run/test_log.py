"""Every data-parallel rank writes its samples, process 0 the metrics."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spec_trainer.data.packing import empty_batch
from spec_trainer.run.batch_schedule import BatchSchedule
from spec_trainer.run.directory import RunDirectory
from spec_trainer.run.draft_trainer import BatchShare
from spec_trainer.run.log import RunLog, cut_records
from spec_trainer.run.metrics import read_metrics
from spec_trainer.run.records import Row, TrainedRow, read_records


def share(run, *sample_ids: int) -> BatchShare:
    samples = [run.dataset.sample(sample_id) for sample_id in sample_ids]
    batch = empty_batch(samples, run.schema, packing=True, seed=0, epoch=0)
    return BatchShare(micro_batches=[batch], denominators=torch.ones(1))


def test_every_rank_notes_its_samples_and_only_rank_0_reports(resolved):
    run = resolved("train.ranks=2", "placement.kind=disaggregated")
    run.directory.logs.mkdir(parents=True)
    shown: list[dict] = []
    for rank in (0, 1):
        with RunLog(run, rank, shown.append) as log:
            log.trained(1, share(run, 3 + rank, 5 + rank))
            log.step({"step": 1, "loss": 2.0, "rank": rank})
    assert shown == [{"step": 1, "loss": 2.0, "rank": 0}]
    assert read_metrics(run.directory.metrics) == shown
    for rank in (0, 1):
        lines = read_records(run.directory.logs / f"trained-{rank}.jsonl", TrainedRow)
        assert lines == [{"step": 1, "samples": [3 + rank, 5 + rank]}]


def test_processes_of_one_data_parallel_rank_write_their_samples_once(resolved):
    spec = resolved("train.ranks=2", "placement.kind=disaggregated")
    settings = replace(spec.schedule.settings, data_parallel_ranks=(0, 0))
    spec = spec.with_schedule(BatchSchedule(spec.dataset, settings))
    spec.directory.logs.mkdir(parents=True)
    with RunLog(spec, 0, lambda record: None) as first, RunLog(spec, 1, lambda record: None) as second:
        first.trained(1, share(spec, 3))
        second.trained(
            1, share(spec, 5)
        )  # not written: the samples of a rank are the same on all its processes
    assert [file.name for file in spec.directory.logs.iterdir()] == ["trained-0.jsonl"]
    assert read_records(spec.directory.logs / "trained-0.jsonl", TrainedRow) == [{"step": 1, "samples": [3]}]


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    """Return the directory of a run whose second rank of two was lost."""
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    write_rows(directory.metrics, *({"step": step, "loss": 1.0, "samples": 1} for step in (1, 2, 3, 4)))
    for rank, steps in enumerate([(1, 3), (2, 4)]):
        rows = [{"step": step, "samples": [step] if step in steps else []} for step in (1, 2, 3, 4)]
        write_rows(directory.logs / f"trained-{rank}.jsonl", *rows)
    return directory


def write_rows(file: Path, *rows: dict) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def steps_in(file: Path) -> list[int]:
    return [row["step"] for row in read_records(file, Row)]


def test_the_records_of_every_rank_end_at_the_checkpoint(directory, caplog):
    lost = {"time": 1.0, "worker": "engine-0", "cause": "killed"}
    write_rows(directory.replacements, {"step": 4, **lost}, {"step": 2, **lost})
    cut_records(directory, 1)
    for file in (directory.metrics, *directory.logs.glob("trained-*.jsonl")):
        assert steps_in(file) == [1]
    assert steps_in(directory.replacements) == [4, 2]  # what has happened has happened
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("metrics.jsonl", "metrics.jsonl lacks rows of 2"),
        ("logs/trained-0.jsonl", "trained-*.jsonl lacks rows of 1"),
        ("logs/trained-1.jsonl", "trained-*.jsonl lacks rows of 1"),
    ],
)
def test_records_that_were_cut_short_are_told(directory, caplog, name, told):
    file = directory.root / name
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    cut_records(directory, 3)
    assert f"{told} of the 3 steps that are done" in caplog.text


def test_a_rank_that_does_not_see_the_run_directory_passes_its_samples_on(resolved):
    run = resolved("train.ranks=2", "placement.kind=disaggregated")
    run.directory.logs.mkdir(parents=True)
    rows: list[dict] = []
    with RunLog(run, 1, lambda record: None, rows.append) as log:
        log.trained(2, share(run, 3))
    assert rows == [{"step": 2, "samples": [3]}]
    assert not list(run.directory.logs.iterdir())


class Notebook:
    def __init__(self) -> None:
        self.pages: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step, scalars):
        self.pages.append((step, scalars))

    def close(self):
        self.closed += 1


def test_trackers_get_every_number_by_a_flat_name_and_are_closed(resolved, monkeypatch):
    books = [Notebook(), Notebook()]
    monkeypatch.setattr("spec_trainer.run.log.build_trackers", lambda track, directory: books)
    run = resolved()
    run.directory.logs.mkdir(parents=True)
    record = {"step": 4, "loss": 2.5, "tokens": 100, "accuracy": [0.5, 0.25], "note": "words"}
    with RunLog(run, 0, lambda record: None) as log:
        log.step(record)
    page = (4, {"loss": 2.5, "tokens": 100, "accuracy/0": 0.5, "accuracy/1": 0.25})
    assert [(book.pages, book.closed) for book in books] == 2 * [([page], 1)]
