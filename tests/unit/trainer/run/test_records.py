import pytest

from spec_core.errors import ArtifactError
from spec_trainer.run.records import (
    KeptSummary,
    ReplacementRow,
    StepRow,
    length_of_served,
    read_figures,
    read_records,
    whole_rows,
)


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (StepRow, "no JSON", "Invalid JSON"),
        (StepRow, '{"step": -1, "loss": 1.0}', "step: "),
        (StepRow, '{"step": 1, "loss": 1.0, "push_version": "<b>"}', "push_version: "),
        (StepRow, '{"step": 1, "loss": 1.0, "samples": "<b>"}', "samples: "),
        (StepRow, '{"step": 1, "loss": "high"}', "loss: "),
        (StepRow, "\0" * (2 << 20), "Invalid JSON"),
        (ReplacementRow, '{"step": "<b>", "time": 0, "worker": "e", "cause": "c"}', "step: "),
    ],
)
def test_what_is_no_row_is_named_with_its_line(tmp_path, kind, text, problem):
    file = tmp_path / "rows"
    file.write_text(f'{text}\n{{"step": 2, "loss": 1, "time": 3, "worker": "e", "cause": "c"}}\n{{"step')
    rows, (damage,) = whole_rows(file, kind)
    assert [row["step"] for _, row in rows] == [2]
    assert str(damage).startswith(f"{file}:1 is damaged")
    assert problem in str(damage)
    with pytest.raises(ArtifactError, match=f"^{file}:1 is damaged"):
        read_records(file, kind)


def test_a_vast_file_of_rows_is_not_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ArtifactError, match=r"metrics\.jsonl has 1099511627776 bytes, expected at most"):
        read_records(file, StepRow)


def test_rows_are_as_they_were_written(tmp_path):
    line = '{"zeta": [1, 2.0], "step": 1, "loss": 1e-3, "alpha": "text"}\n'
    (tmp_path / "rows").write_text(line)
    ((text, row),), _ = whole_rows(tmp_path / "rows", StepRow)
    assert (text, list(row)) == (line, ["zeta", "step", "loss", "alpha"])


def test_figures_that_are_none_are_named(tmp_path):
    file = tmp_path / "summary.json"
    file.write_text('{"cycles": [{"cycle": 0, "draft_version": "<b>"}]}')
    with pytest.raises(ArtifactError, match=f"^{file} is damaged: .*draft_version"):
        read_figures(file, KeptSummary)


@pytest.mark.parametrize(
    ("served", "length"),
    [(30, "acceptance_length"), (20, "acceptance_length_served"), (0, "acceptance_length_start")],
)
def test_length_shown_beside_a_version_is_of_the_draft_that_a_verdict_let_serve(served, length):
    """A push replaces the draft that was served before, whose length is another."""
    assert length_of_served({"step": 30, "parent": 20, "served": served}) == length
