"""Answers as llama.cpp streams them: which guess was verified at which token, and what ends an answer early."""

import json
import threading
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from spec_core.errors import EngineError
from spec_engine_llamacpp.subprocess_main import StreamedAnswer, answer

MESSAGE = {"ids": [1, 2], "ends": [9], "max_new_tokens": 4, "drafted": 0, "sampling": {"temperature": 0.0}}


def part(token: int, drafted: int = 0, accepted: int = 0) -> dict:
    return {"tokens": [token], "timings": {"draft_n": drafted, "draft_n_accepted": accepted, "cache_n": 0}}


def test_tokens_of_a_verification_have_the_depths_of_its_guesses():
    found = StreamedAnswer()
    found.begin()
    counts = [(0, 0), (3, 0), (6, 2), (6, 2), (6, 2), (9, 5), (9, 5), (9, 5), (9, 5), (9, 5), (11, 5)]
    for place, (drafted, accepted) in enumerate(counts):
        found.add(part(place, drafted, accepted), 0.0)
    # the prefill's token; none of 3; two of 3; all 3 and a token of the target's; a pass without a draft; none of 2
    assert found.depths == [0, 1, 1, 2, 3, 1, 2, 3, 0, 0, 1]
    assert found.rounds == [[3, 0], [3, 2], [3, 3], [2, 0]]


@pytest.fixture
def serve():
    """``serve(*streams)``: a connection to a server that answers one request after the other with these lines."""
    servers = []

    def start(*streams: list[str]) -> tuple[HTTPConnection, list[dict]]:
        waiting, asked = iter(streams), []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()
                self.wfile.write("".join(f"{line}\n\n" for line in next(waiting)).encode())

            def log_message(self, *words: object) -> None:
                """Keep the tests' output free of requests."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return HTTPConnection("127.0.0.1", server.server_port), asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def lines(*parts: dict, stop: bool = True) -> list[str]:
    return [f"data: {json.dumps(fields)}" for fields in (*parts, {"tokens": [], "stop": stop})]


def test_an_answer_that_ends_at_a_token_of_the_servers_own_is_continued(serve):
    connection, asked = serve(lines(part(5), part(6)), lines(part(7), part(8)))
    with closing(connection):
        assert answer(connection, MESSAGE)["ids"] == [5, 6, 7, 8]
    assert [body["prompt"] for body in asked] == [[1, 2], [1, 2, 5, 6]]
    assert [body["n_predict"] for body in asked] == [4, 2]


def test_an_end_token_that_the_server_does_not_know_ends_the_answer(serve):
    connection, asked = serve(lines(part(5), part(9), part(6)))
    with closing(connection):
        assert answer(connection, MESSAGE)["ids"] == [5, 9]
    assert len(asked) == 1


@pytest.mark.parametrize(
    "stream", [lines(part(5), stop=False), ['data: {"tokens": [5]}'], ['error: {"message": "no slot"}'], []]
)
def test_a_stream_that_breaks_off_is_an_error(serve, stream):
    connection, _ = serve(stream)
    with (
        closing(connection),
        pytest.raises(EngineError, match=r"\Allama.cpp ended an answer early: [^\n]*\Z"),
    ):
        answer(connection, MESSAGE)
