"""What a training command says about its steps."""

import logging

import pytest

from spec_trainer.base.stop_request import Interrupted
from spec_trainer.base.time_limit import TimeLimit
from spec_trainer.cli.commands.train import run_training


def test_steps_that_are_only_timed_have_no_number_and_no_time_left(resolved, caplog):
    run = resolved("train.steps=100000", "train.warmup_steps=0")
    with caplog.at_level(logging.INFO, "spec_trainer.base.progress"), pytest.raises(Interrupted):
        run_training(run, steps_limit=TimeLimit(0.0, has_begun=False))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines
    assert lines[0].startswith("step 1 loss ")
    assert not [line for line in lines if "100000" in line or " left" in line]
