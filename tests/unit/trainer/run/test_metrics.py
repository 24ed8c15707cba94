"""metrics.jsonl: every step once, whatever happened."""

import pytest

from spec_core.errors import RunError
from spec_trainer.run.metrics import StepLines, drop_after
from spec_trainer.run.records import Row, StepRow, read_records


def test_records_come_back_with_floats_in_full(tmp_path):
    record = {"step": 1, "loss": 0.1 + 0.2, "accuracy": [1 / 3, 2 / 3]}
    with StepLines(tmp_path / "lines") as lines:
        lines.write(record)
        assert read_records(tmp_path / "lines", Row) == [record]  # at once: a crash must not lose it


def test_reopened_it_drops_what_a_crashed_run_wrote_later(tmp_path):
    file = tmp_path / "lines"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    assert drop_after(file, 2, Row).keys() == {1, 2}
    with StepLines(file) as lines:
        lines.write({"step": 3, "again": True})
    assert read_records(file, Row) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_a_full_disk_is_told_with_the_file(tmp_path, full_disk):
    file = tmp_path / "lines"
    with (
        full_disk(),
        pytest.raises(RunError, match=f"^{file} was not written: .*File too large"),
        StepLines(file) as lines,
    ):
        lines.write({"step": 1})
    assert read_records(file, Row) == []


@pytest.mark.parametrize(
    "damaged", [b'{"step": 1', b"{}", b"[1]", b'"\xff"', b'{"step": null}', b'{"step": 1e999}', b""]
)
def test_a_damaged_row_is_told_and_dropped(tmp_path, caplog, damaged):
    file = tmp_path / "lines"
    file.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    assert drop_after(file, 3, Row).keys() == {1, 3}
    assert f"{file}:2 is damaged" in caplog.text
    assert read_records(file, Row) == [{"step": 1}, {"step": 3}]


def test_rows_of_another_file_are_none_of_this_one(tmp_path, caplog):
    file = tmp_path / "lines"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "samples": []}\n')
    assert drop_after(file, 3, StepRow).keys() == {1}
    assert f"{file}:2 is damaged" in caplog.text
    assert "the run goes on without 1 of its rows" in caplog.text


def test_a_link_to_nothing_is_removed(tmp_path):
    file = tmp_path / "lines"
    file.symlink_to(tmp_path / "elsewhere")
    assert drop_after(file, 3, Row) == {}
    with StepLines(file) as lines:
        lines.write({"step": 1})
    assert not (tmp_path / "elsewhere").exists()


def test_no_file_is_no_records(tmp_path):
    assert read_records(tmp_path / "nowhere", Row) == []
