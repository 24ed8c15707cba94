"""Progress of a run where there is no terminal."""

import logging

from spec_trainer.base.progress import StepProgress, step_note

RECORD = {
    "step": 3, "loss": 3.21049, "acceptance_length": 1.844, "tokens_per_s": 5120.4,
    "time_step_s": 3.8, "time_data_s": 0.2,
}  # fmt: skip


def test_record_in_words():
    assert step_note(RECORD) == "loss 3.210  tau 1.84  5,120 tok/s  waits 5 % for features (trainer-bound)"
    assert "tau 1.84 (T 1: 1.43)  5,120" in step_note(RECORD | {"acceptance_length_t1": 1.432})
    slow = step_note({**RECORD, "time_data_s": 1.0})
    assert slow.endswith("waits 21 % for features (engine-bound)")
    assert step_note({**RECORD, "serving_version": 500}).endswith("(trainer-bound)  serves v500")


def test_first_and_last_step_are_logged_and_not_every_one_between(caplog):
    with caplog.at_level(logging.INFO, "spec_trainer.base.progress"), StepProgress(50) as progress:
        for step in range(1, 51):
            progress.show({**RECORD, "step": step})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("step 1/50 loss 3.210")
    assert lines[1].startswith("step 50/50 ")


def test_a_line_says_how_long_the_rest_will_take_at_the_pace_so_far(caplog, monkeypatch):
    now = iter([100.0, 160.0, 220.0, 1000.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with caplog.at_level(logging.INFO, "spec_trainer.base.progress"):
        progress = StepProgress(100)
        for step in (11, 12, 13, 100):
            progress.show({**RECORD, "step": step})
    lines = [record.getMessage() for record in caplog.records]
    assert "left" not in lines[0]
    assert lines[1].endswith("  about 1.5 h left")  # 88 minutes
    assert lines[2].endswith("  about 1.4 h left")  # 87
    assert "left" not in lines[3]


def test_of_a_number_of_steps_that_is_not_known_no_time_is_left(caplog):
    with caplog.at_level(logging.INFO, "spec_trainer.base.progress"), StepProgress(None) as progress:
        progress.show(RECORD)
    assert caplog.records[0].getMessage() == "step 3 " + step_note(RECORD)


def test_a_forced_colour_makes_no_terminal(monkeypatch, caplog):
    """Else a log file would hold a bar for every step."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with caplog.at_level(logging.INFO, "spec_trainer.base.progress"), StepProgress(1) as progress:
        progress.show({**RECORD, "step": 1})
    assert len(caplog.records) == 1
