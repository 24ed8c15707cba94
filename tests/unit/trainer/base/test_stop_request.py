"""Signals ask; only a second SIGINT insists."""

import signal
import threading

import pytest

from spec_trainer.base.stop_request import StopRequest


@pytest.fixture(autouse=True)
def with_a_terminal():
    """These tests may themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_and_told(number):
    told = []
    with StopRequest() as stop:
        assert not stop.requested
        stop.on_request(lambda: told.append(number))
        signal.raise_signal(number)
        assert stop.requested
    assert told == [number]


def test_sigint_twice_interrupts_at_once():
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_sigterm_twice_is_still_a_request_of_which_the_person_is_told_once(capfd):
    """Service managers repeat themselves, and a step, or the start of an engine, may take minutes."""
    with StopRequest() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    assert capfd.readouterr().err == (
        "spec-trainer: stopping after this step; a second Ctrl-C stops at once\n"
    )


def test_earlier_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_under_nohup_the_terminal_s_end_is_no_request():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


WAIT_S = 60.0
"""Longest time for a timer to come, on a busy machine."""


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 0.05])
def test_after_a_time_a_stop_is_requested_without_a_signal(seconds, capfd):
    told = threading.Event()
    with StopRequest() as stop:
        stop.on_request(told.set)
        stop.request_after(seconds)
        assert told.wait(WAIT_S)
        assert stop.requested
    assert capfd.readouterr().err == "", "nobody has pressed a key"


def test_a_sigint_after_the_time_interrupts_at_once():
    told = threading.Event()
    with StopRequest() as stop:
        stop.on_request(told.set)
        stop.request_after(0.0)
        assert told.wait(WAIT_S)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_after_the_block_no_stop_is_requested():
    told = threading.Event()
    with StopRequest() as stop:
        stop.on_request(told.set)
        stop.request_after(0.2)
    assert not told.wait(0.5)
    assert not stop.requested
