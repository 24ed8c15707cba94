"""A command that waits says what for, from the first ten seconds on."""

import logging
import threading
import time

import pytest

from spec_trainer.base import waiting
from spec_trainer.base.progress import StepProgress
from spec_trainer.base.waiting import Waiting


@pytest.fixture
def told(monkeypatch, caplog):
    """``told(beginning)`` waits for a line with this beginning."""
    monkeypatch.setattr(waiting, "LINE_EVERY_S", 0.01)
    caplog.set_level(logging.INFO, waiting.__name__)

    def wait_for(beginning: str) -> None:
        while not any(message.startswith(beginning) for message in caplog.messages):
            time.sleep(0.01)

    return wait_for


def test_what_is_waited_for_is_told_until_it_ends(told, caplog):
    with Waiting("starting engine vllm") as wait:
        told("starting engine vllm: ")
        wait.begin("first answers")
        told("first answers: ")
    assert caplog.messages[-1].endswith(" s so far")
    assert not [thread for thread in threading.enumerate() if thread.name == "waiting"]


def test_a_run_says_that_it_waits_for_its_first_step_and_then_for_the_next_one(told):
    with StepProgress(80, note=lambda record: "fine") as progress:
        told("training, first step: ")
        progress.show({"step": 7})
        told("training, step 8/80: ")


def test_a_command_without_an_end_waits_in_silence():
    """It may have nothing to train on for days."""
    with StepProgress(None, "following", says_waits=False):
        assert not [thread for thread in threading.enumerate() if thread.name == "waiting"]
