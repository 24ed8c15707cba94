"""Every data-parallel rank writes its samples, process 0 the metrics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from spec_trainer.batch_schedule import BatchSchedule
from spec_trainer.data.packing import empty_batch
from spec_trainer.draft_trainer import BatchShare
from spec_trainer.metrics import read_metrics
from spec_trainer.run_log import RemoteRankFiles, RunLog


def share(run, *sample_ids: int) -> BatchShare:
    samples = [run.dataset.sample(sample_id) for sample_id in sample_ids]
    batch = empty_batch(samples, run.schema, packing=True, seed=0, epoch=0)
    return BatchShare(micro_batches=[batch], denominators=torch.ones(1))


def test_every_rank_notes_its_samples_and_only_rank_0_reports(resolved):
    run = resolved("train.ranks=2", "placement.kind=disaggregated")
    run.directory.logs.mkdir(parents=True)
    shown: list[dict] = []
    for rank in (0, 1):
        with RunLog(run, rank, 0, shown.append) as log:
            log.trained(1, share(run, 3 + rank, 5 + rank))
            log.step({"step": 1, "rank": rank})
    assert shown == [{"step": 1, "rank": 0}]
    assert read_metrics(run.directory.metrics) == shown
    for rank in (0, 1):
        lines = read_metrics(run.directory.logs / f"trained-{rank}.jsonl")
        assert lines == [{"step": 1, "samples": [3 + rank, 5 + rank]}]


def test_processes_of_one_data_parallel_rank_write_their_samples_once(resolved):
    spec = resolved("train.ranks=2", "placement.kind=disaggregated")
    settings = replace(spec.schedule.settings, data_parallel_ranks=(0, 0))
    spec = spec.with_schedule(BatchSchedule(spec.dataset, settings))
    spec.directory.logs.mkdir(parents=True)
    with RunLog(spec, 0, 0, lambda record: None) as first, RunLog(spec, 1, 0, lambda record: None) as second:
        first.trained(1, share(spec, 3))
        second.trained(
            1, share(spec, 5)
        )  # not written: the samples of a rank are the same on all its processes
    assert [file.name for file in spec.directory.logs.iterdir()] == ["trained-0.jsonl"]
    assert read_metrics(spec.directory.logs / "trained-0.jsonl") == [{"step": 1, "samples": [3]}]


def test_on_fewer_ranks_the_notes_of_the_others_end_at_the_checkpoint(resolved):
    run = resolved()
    run.directory.logs.mkdir(parents=True)
    other = run.directory.logs / "trained-1.jsonl"
    other.write_text('{"step": 1, "samples": []}\n{"step": 2, "samples": []}\n')
    with RunLog(run, 0, 1, lambda record: None):
        pass
    assert [record["step"] for record in read_metrics(other)] == [1]


def test_a_rank_that_does_not_see_the_run_directory_has_its_samples_written_by_another(resolved):
    run = resolved("train.ranks=2", "placement.kind=disaggregated")
    run.directory.logs.mkdir(parents=True)
    (run.directory.logs / "trained-1.jsonl").write_text(
        '{"step": 1, "samples": []}\n{"step": 2, "samples": []}\n'
    )
    with (
        RemoteRankFiles(run.directory.logs) as files,
        RunLog(run, 1, 1, lambda record: None, partial(files.write, 1)) as log,
    ):
        log.trained(2, share(run, 3))
        log.trained(3, share(run, 5))
    assert read_metrics(run.directory.logs / "trained-1.jsonl") == [
        {"step": 1, "samples": []},
        {"step": 2, "samples": [3]},
        {"step": 3, "samples": [5]},
    ]
