"""A server that hangs delays no stop, and one that fails again and again fills no log."""

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from spec_trainer.live import traffic
from spec_trainer.live.traffic import Traffic

from ...kit.hosting.test_program_replicas import ANSWER, Server

ROW = {"prompt": [5, 6], "answer": [7, 8, 9], "label": "chat", "states": None}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "secret")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.may_answer.set()
        server.shutdown()
        thread.join()


def opened(server: Server) -> Traffic:
    return Traffic([f"http://127.0.0.1:{server.server_port}"], 60.0)


def test_a_stop_does_not_wait_for_a_server_that_hangs(server, monkeypatch) -> None:
    monkeypatch.setattr(traffic, "_GRACE_S", 0.2)
    server.may_answer.clear()
    began_s = time.monotonic()
    assert opened(server).take(lambda: True) == []
    assert time.monotonic() - began_s < 10


def test_requests_that_come_before_a_stop_are_returned(server, monkeypatch) -> None:
    monkeypatch.setattr(traffic, "_GRACE_S", 30.0)
    server.pieces = iter([(200, ANSWER)])
    server.answer = (200, {"requests": [ROW] * 3, "left": 9, "stored": 9, "left_out": {}})
    taken = opened(server).take(lambda: len(server.asked) > 1)
    assert [one.request.model_dump() for one in taken] == [ROW]


def test_a_server_whose_answers_are_wrong_is_logged_once(server, caplog) -> None:
    found = opened(server)
    for number in (1, 10, 100):
        server.pieces = iter([(200, ANSWER)])
        server.answer = (200, {"requests": [number], "left": 0, "stored": 0, "left_out": {}})
        assert found.take() == []
    assert len([one for one in caplog.records if "answered requests with" in one.message]) == 1
    server.answer = (500, {"error": "out of memory"})
    assert found.take() == []
    assert "out of memory" in caplog.messages[-1]


def test_a_line_every_ten_seconds_says_that_no_server_answers(server, caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO, "spec_trainer.live.traffic")
    monkeypatch.setattr(traffic, "LINE_EVERY_S", 0.0)
    found = opened(server)
    server.answer = (500, {"error": "out of memory"})
    for _ in range(3):
        found.take()
    assert [line.partition(": ")[0] for line in caplog.messages[1:]] == [
        "no server of follow.servers answers"
    ] * 2
    server.pieces = iter([(200, ANSWER)])
    server.answer = (200, {"requests": [], "left": 0, "stored": 0, "left_out": {}})
    found.take()
    assert "answers again" in caplog.messages[-1]
