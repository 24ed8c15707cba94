"""An answer is stored or counted once, and the client gets every message."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from spec_kit.live_traffic import LiveAnswer, LiveRequests, LiveRequestsConfig, passed_on


@pytest.fixture
def requests() -> LiveRequests:
    return LiveRequests(LiveRequestsConfig(share=1.0), timed=False)


def test_an_answer_that_has_ended_is_stored_once(requests) -> None:
    answer = LiveAnswer(requests, "ab" * 8)
    answer.end([1], [2, 3])
    answer.leave_out("unfinished")
    taken = requests.take()
    assert taken["requests"] == [{"prompt": [1], "answer": [2, 3], "label": "other", "states": "ab" * 8}]
    assert taken["left_out"] == {}


def test_an_answer_is_counted_by_its_first_reason(requests) -> None:
    answer = LiveAnswer(requests)
    answer.leave_out("other_tokens")
    answer.leave_out("unfinished")
    assert requests.take()["left_out"] == {"other_tokens": 1}


def test_messages_pass_although_noting_fails_and_what_has_not_ended_is_counted(requests) -> None:
    begun: list[str] = []
    ended, running = LiveAnswer(requests), LiveAnswer(requests)

    async def messages() -> AsyncGenerator[int, None]:
        begun.append("messages")
        for number in range(4):
            yield number

    def note(message: Any) -> None:
        if message == 1:
            raise ValueError("the text of a request")
        if message == 3:
            ended.end([1], [2])

    async def run() -> list[int]:
        passed = passed_on(messages, requests, note, [ended, running])
        assert begun == []
        return [message async for message in passed]

    assert asyncio.run(run()) == [0, 1, 2, 3]
    taken = requests.take()
    assert len(taken["requests"]) == 1
    assert taken["left_out"] == {"error": 1, "unfinished": 1}
