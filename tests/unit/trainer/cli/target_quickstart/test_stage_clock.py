"""The time of a stage is charged to its round, however the stage ends."""

import subprocess
import sys
import time

import pytest

from spec_trainer.cli.target_quickstart.folder import Round
from spec_trainer.cli.target_quickstart.stage_clock import charged

KILLED = """
import sys, time
from pathlib import Path
from spec_trainer.cli.target_quickstart.folder import Round
from spec_trainer.cli.target_quickstart.stage_clock import charged

with charged(Round(Path(sys.argv[1])), "answers"):
    time.sleep(600)
"""


def test_a_stage_that_ends_has_its_time(tmp_path):
    one = Round(tmp_path)
    with charged(one, "answers"):
        time.sleep(0.2)
    one.charge_interrupted()
    assert 0.1 < one.spent["answers"] < 60
    assert one.interrupted_s == 0


def test_stages_that_are_stopped_are_charged_together(tmp_path):
    one = Round(tmp_path)

    def stopped():
        time.sleep(0.3)
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), charged(one, "answers"):
            stopped()
        assert one.spent == {}
        one.charge_interrupted()
    assert 0.5 < one.interrupted_s < 60
    one.charge_interrupted()
    assert 0.5 < one.interrupted_s < 60, "each once"


def test_a_killed_stage_is_charged(tmp_path):
    one = Round(tmp_path)
    begun = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path])
    while not one.unended.exists():
        assert process.poll() is None
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert one.spent == {}
    one.charge_interrupted()
    assert 0.1 < one.interrupted_s < 60
