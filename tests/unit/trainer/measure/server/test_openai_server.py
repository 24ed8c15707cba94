"""Whatever a server streams, an answer is one line or the text, in time."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import pytest

from spec_core.errors import EngineError
from spec_trainer.measure.server.load import ask_at_once
from spec_trainer.measure.server.openai_server import OpenAiServer
from spec_trainer.measure.server.questions import COMPLETION, Question

LIMIT_S = 20.0
OPTIONS = {"max_tokens": 4}
QUESTION = Question(path=COMPLETION, fields={"prompt": "p"})
OK = b"HTTP/1.1 200 OK\r\n\r\n"
MODELS = OK + b'{"data": [{"id": "m"}]}'


def event(**fields: object) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


TEXT = event(choices=[{"text": "ab"}])
USAGE = event(choices=[], usage={"completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


@contextmanager
def answering(parts: Iterable[bytes], pause_s: float = 0.0, models: bytes = MODELS) -> Iterator[str]:
    """Yield the address of a server that lists models, has no metrics, and answers a POST with ``parts``."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            head = connection.recv(1 << 16)
            if not head.startswith(b"POST"):
                connection.sendall(models if b"/v1/models" in head else b"HTTP/1.1 404 No\r\n\r\n")
                return
            for part in parts:
                connection.sendall(part)
                if over.wait(pause_s):
                    return

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_an_answer_in_any_pieces_is_the_same() -> None:
    whole = OK + b": a comment\r\n\r\n" + TEXT.replace(b"\n", b"\r\n") + TEXT + USAGE + DONE
    pieces = [whole[place : place + 7] for place in range(0, len(whole), 7)]
    for parts in ([whole], pieces):
        with answering(parts) as url, OpenAiServer(url, LIMIT_S) as server:
            answer = server.answer(QUESTION, OPTIONS)
        assert (answer.text, answer.num_tokens) == ("abab", 3)
        assert answer.times is not None
        assert len(answer.times.parts_s) == 2


def test_reasoning_and_calls_of_a_chat_are_text_and_parts_without_any_have_no_time() -> None:
    function = {"name": "f", "arguments": "{}"}
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "so", "reasoning": "so"},
        {"reasoning": "?", "content": "yes"},  # several guesses, verified at once
        {"tool_calls": [{"id": "drawn", "function": function}, {"function": None}, None]},
    ]
    parts = [OK, *(event(choices=[{"delta": delta}]) for delta in deltas), USAGE, DONE]
    with answering(parts) as url, OpenAiServer(url, LIMIT_S) as server:
        answer = server.answer(QUESTION, OPTIONS)
    assert answer.text == "so?yesf{}"
    assert answer.times is not None
    assert len(answer.times.parts_s) == 3


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([OK, TEXT, DONE], "does not count the tokens of its answer: expected usage"),
        ([OK, TEXT, USAGE], r"ended an answer in its middle: expected data: \[DONE\]"),
        ([OK, b"data: {\n\n"], "streams what is no part of an answer: b'{': "),
        ([OK, b"data: [1]\n\n"], "expected an object, got list"),
        (
            [OK, b"data: " + b"[" * 100_000 + b"\n\n"],
            "streams what is no part of an answer: .* nested too deeply",
        ),
        ([OK, event(error={"message": "two\nlines", "code": 500})], r"failed an answer: .*two\\nlines"),
        (
            [b'HTTP/1.1 400 Bad Request\r\n\r\n{"message": "too\nlong \x1b[2J"}'],
            r'refused completions: 400 Bad Request: {"message": "too long \\x1b\[2J"}$',
        ),
        (
            [b"HTTP/1.1 307 Moved\r\nLocation: http://elsewhere:1/\r\n\r\n"],
            "refused completions: 307 Moved; it redirects to 'http://elsewhere:1/'",
        ),
        ([b"SSH-2.0-OpenSSH_9.0\r\n\r\n"], "does not answer completions: it speaks no HTTP"),
        ([b""], "does not answer completions: it closed the connection without an answer"),
        (
            [b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", TEXT],
            "does not answer completions: .*received .* bytes, expected 999",
        ),
    ],
)
def test_what_is_no_answer_is_one_line(parts, problem) -> None:
    with answering(parts) as url, OpenAiServer(url, LIMIT_S) as server:
        with pytest.raises(EngineError, match=problem) as error:
            server.answer(QUESTION, OPTIONS)
        assert str(error.value).startswith(f"{url} ")
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 2_000


def test_an_answer_without_an_end_is_left_when_it_is_too_long() -> None:
    endless = itertools.chain([OK], itertools.repeat(TEXT * 1000))
    with (
        answering(endless) as url,
        OpenAiServer(url, LIMIT_S) as server,
        pytest.raises(EngineError, match=r"does not answer completions: its answer has more than \d+ bytes"),
    ):
        server.answer(QUESTION, OPTIONS)


@pytest.mark.parametrize("drip", [b"", b"data: ", TEXT, b": alive\n\n"])
def test_an_answer_that_drips_is_left_when_its_time_is_over(drip) -> None:
    endless = itertools.chain([OK], itertools.repeat(drip))
    with (
        answering(endless, pause_s=0.02) as url,
        OpenAiServer(url, 0.5) as server,
        pytest.raises(EngineError, match=r"does not answer completions: no whole answer came within 0\.5 s"),
    ):
        server.answer(QUESTION, OPTIONS)


def test_the_first_failure_ends_the_answers_that_hang() -> None:
    """One question fails while the other three hang; nobody waits for their time to be over."""
    numbers = itertools.count()

    class OneFails:
        def __iter__(self) -> Iterator[bytes]:
            return (
                iter([OK, b"data: {\n\n"])
                if next(numbers) == 3
                else itertools.chain([OK], itertools.repeat(b""))
            )

    start, problem = time.monotonic(), "streams what is no part of an answer"
    with (
        answering(OneFails(), pause_s=0.02) as url,
        OpenAiServer(url, 300.0) as server,
        pytest.raises(EngineError, match=problem),
    ):
        ask_at_once(server, [QUESTION] * 4, OPTIONS, 4)
    assert time.monotonic() - start < 60  # and not 300


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"data": []}', b'{"data": [{"id": 3}]}', b"[" * 99_999]
)
def test_a_server_without_models_is_one_line(body) -> None:
    with (
        answering([], models=OK + body) as url,
        pytest.raises(EngineError, match="has no list of models") as error,
    ):
        OpenAiServer(url, LIMIT_S)
    assert str(error.value).isprintable()
