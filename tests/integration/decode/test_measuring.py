"""Runs that measure their draft in their own engine while they train."""

from pathlib import Path

import pytest

from spec_trainer.run.records import MeasurementRow, read_records

from .. import launching, run_directory
from .conftest import CHAIN, EVERY, STEPS

NOT_DECODING = {
    "train__serve_every": 0,
    "decode__prompts": 64,
    "decode__max_new_tokens": 256,
    "decode__temperature": 1,
    "decode__num_draft_tokens": "null",
}
"""Nothing but defaults: a run that does not decode refuses others."""
MEASURED = {"decode__every": 0, "train__push_every": 0, "train__serve_every": EVERY}


@pytest.fixture(scope="module")
def measured(lab: launching.Lab) -> Path:
    lab.train_here(lab.folder / "measured", **MEASURED, **CHAIN)
    return lab.folder / "measured"


@pytest.mark.slow
def test_a_run_measures_its_draft_in_its_engine(lab, measured):
    records = run_directory.metrics(measured)
    measurements = [record for record in records if "serving_tokens_per_s" in record]
    assert [record["step"] for record in measurements] == [10, 20, 30]
    versions = [None] * 9 + [10] * 10 + [20] * 10 + [30]
    assert [record.get("serving_version") for record in records] == versions
    assert measurements[-1]["serving_acceptance_length"] > 1.25
    for record in measurements:
        assert 1 <= record["serving_acceptance_length_per_request"] <= 4
        assert len(record["serving_acceptance_per_position"]) == 3
        assert record["serve_wait_s"] > record["serving_s"] > 0
    end = run_directory.summary(measured)
    assert end["acceptance_length"] == measurements[-1]["serving_acceptance_length"]
    assert end["time_s"]["serve"] == pytest.approx(sum(r["serve_wait_s"] for r in measurements))
    assert "The draft in the run's engine" in (measured / "report.html").read_text()
    weights = [folder / "model.safetensors" for folder in (measured / "decoded/draft-30", measured / "draft")]
    assert weights[0].read_bytes() == weights[1].read_bytes()

    alone = lab.folder / "not-measured"
    lab.train_here(alone, **MEASURED | NOT_DECODING, **CHAIN)
    assert run_directory.losses(alone) == run_directory.losses(measured)


@pytest.mark.slow
def test_workers_measure_what_one_process_does(lab, measured):
    """Rank 0 hears of it some steps later, and of the last draft before the end."""
    output = lab.folder / "measured-by-workers"
    lab.train(output, **MEASURED, **CHAIN, placement__kind="disaggregated", train__ranks=2)
    here, there = (
        read_records(run / "decoded/measurements.jsonl", MeasurementRow) for run in (measured, output)
    )
    for one, other in zip(here, there, strict=True):
        assert [one[key] for key in ("step", "serving_tokens")] == [
            other[key] for key in ("step", "serving_tokens")
        ]
        for key in ("serving_acceptance_length", "serving_acceptance_length_per_request"):
            assert one[key] == pytest.approx(other[key], abs=0.1)
    last = run_directory.metrics(output)[-1]
    assert last["serving_version"] == STEPS
    assert run_directory.summary(output)["acceptance_length"] == last["serving_acceptance_length"]
    assert "pushed in" in (output / "logs/decoder-0.log").read_text()
