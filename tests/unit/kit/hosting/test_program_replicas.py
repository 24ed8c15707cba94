"""Calls reach the program that serves a draft, and its refusals come back in one line."""

import json
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from spec_core import UpdateRequest
from spec_core.errors import ConfigError, EngineError
from spec_core.records import FeatureSchema
from spec_kit.hosting import HttpReplica, ProgramReplica
from spec_kit.hosting.backend_search import backend_for
from spec_kit.live_traffic import served_states
from spec_processes.sockets import server_address

from .update_server import ANSWER, SERVED, UPDATE, Server, running_server

REQUEST = UpdateRequest(update=UPDATE, replica="a", address="127.0.0.1:1", token="t", seconds=9.0)
CALLS = [
    ("prepare", REQUEST, REQUEST.model_dump_json()),
    *[(name, UPDATE, UPDATE.model_dump_json()) for name in ("commit", "revert", "abort")],
]


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_a_server_is_asked_by_its_routes(server, url) -> None:
    replica = HttpReplica(url, "secret")
    assert replica.num_ranks == 2
    assert replica.status().result(10) == SERVED
    for name, argument, body in CALLS:
        assert getattr(replica, name)(argument).result(10) == SERVED
        assert server.asked[-1] == ("POST", f"/spec/draft/{name}", body)
    assert server.asked[0] == ("GET", "/spec/draft/status", "")
    assert replica.acceptance().accepted_per_position == (2, 1, 0)
    assert replica.acceptance(rounds=9, wait_s=0.5).rounds == 2
    assert server.asked[-1] == ("GET", "/spec/draft/status?rounds=9&wait_s=0.5", "")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((409, {"error": "update 7 is over"}), "refused commit: update 7 is over"),
        ((404, {}), "has no /spec/draft/commit; start it with"),
        ((200, b"<html>"), "is no server .*: it answered commit with 200 'OK', b'<html>': .* Invalid JSON"),
        ((200, [1]), "is no server with this project's extension"),
        ((500, {"error": ["no"]}), "it answered commit with 500 'Internal Server Error'"),
        ((200, {"status": "fine"}), "is no server with this project's extension"),
        ((200, {**ANSWER, "ranks": 0}), "is no server with this project's extension"),
    ],
)
def test_a_refusal_of_a_server_ends_the_future(server, url, answer, problem) -> None:
    replica = HttpReplica(url, "secret")
    server.answer = answer
    with pytest.raises(EngineError, match=problem):
        replica.commit(UPDATE).result(10)


def test_a_server_that_cannot_be_used_is_refused_at_once(server, url) -> None:
    with pytest.raises(EngineError, match="refused status: a bearer token is needed"):
        HttpReplica(url, "another")
    for wrong in ("localhost:8000", "http://localhost:eight", "http://[::1:8000"):
        with pytest.raises(ConfigError, match="is no address of a server; expected http://host:port"):
            HttpReplica(wrong, "secret")
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1 does not answer status: Connection refused"):
        HttpReplica("http://127.0.0.1:1", "secret")


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://a:1",
        "http://",
        "http://a:port",
        "http://a:99999",
        "http://[::1",
        "http://me:secret@a:1",
        "http://a:1?x=2",
    ],
)
def test_what_is_no_address_is_refused(url) -> None:
    with pytest.raises(ConfigError, match="is no address of a server; expected http://host:port"):
        server_address(url)


def test_a_host_that_no_name_can_have_does_not_answer() -> None:
    with pytest.raises(EngineError, match=r"http://a\.\.b:1 does not answer status: "):
        HttpReplica("http://a..b:1", "secret")


@pytest.mark.parametrize("token", ["", "line\r", "two\nx-more: lines", " hidden", "…"])
def test_a_token_that_no_header_carries_is_refused_and_not_shown(token) -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent; .* \(SPEC_DRAFT_TOKEN\)$") as refusal:
        HttpReplica("http://127.0.0.1:1", token)
    assert not token or token.strip() not in str(refusal.value)


def test_closing_ends_a_call_that_waits_for_its_answer(server, url) -> None:
    replica = HttpReplica(url, "secret")
    assert server.is_asked.acquire(timeout=10)
    server.may_answer.clear()
    call = replica.commit(UPDATE)
    assert server.is_asked.acquire(timeout=10)  # the call is under way
    replica.close()
    with pytest.raises(EngineError, match="does not answer commit"):
        call.result(10)
    server.may_answer.set()
    with pytest.raises(EngineError, match="does not answer commit: this side has closed"):
        replica.commit(UPDATE).result(10)


@pytest.mark.parametrize(("name", "argument", "body"), CALLS)
def test_a_program_is_asked_by_its_process(name, argument, body) -> None:
    asked: list[tuple[str, str]] = []

    def ask(call: str, argument: str) -> Future[dict[str, Any]]:
        asked.append((call, argument))
        done: Future[dict[str, Any]] = Future()
        done.set_result(ANSWER)
        return done

    assert getattr(ProgramReplica(ask, num_ranks=2), name)(argument).result(1) == SERVED
    assert asked == [(name, body)]


def test_a_refusal_of_a_program_ends_the_future() -> None:
    def ask(call: str, argument: str) -> Future[dict[str, Any]]:
        refused: Future[dict[str, Any]] = Future()
        refused.set_exception(EngineError("vLLM refused a request"))
        return refused

    with pytest.raises(EngineError, match="vLLM refused"):
        ProgramReplica(ask, num_ranks=1).status().result(1)


def test_a_backend_is_found_by_its_devices() -> None:
    assert backend_for("cpu").device_type == "cpu"
    with pytest.raises(
        EngineError, match=r"no installed backend has devices of type 'abacus'; installed are .*cpu"
    ):
        backend_for("abacus")


def test_requests_are_taken(server, url) -> None:
    row = {"prompt": [1], "answer": [2], "label": "chat", "states": None}
    taken = {"requests": [row], "left": 3, "stored": 4, "left_out": {"route": 1}}
    with HttpReplica(url, "secret") as replica:
        server.answer = (200, taken)
        assert replica.take_requests().model_dump() == taken
        assert server.asked[-1] == ("POST", "/spec/draft/requests", "{}")
        server.answer = (409, {"error": "this server keeps no requests"})
        with pytest.raises(EngineError, match="refused requests: this server keeps no requests"):
            replica.take_requests()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [31337], "answer": [-31337]},
        {"prompt": [31337]},
        31337,
        {"prompt": [1], "answer": [2], "label": "31337 31337"},
    ],
)
def test_what_is_no_request_is_not_quoted(server, url, row) -> None:
    with HttpReplica(url, "secret") as replica:
        server.answer = (200, {"requests": [row], "left": 0, "stored": 0, "left_out": {}})
        with pytest.raises(EngineError, match="bytes that are none") as error:
            replica.take_requests()
    assert "31337" not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    "left_out", [{"a\nb": 1}, {"<b>": 1}, {"a" * 99: 1}, {"route": 10**4000}, {"route": -1}]
)
def test_counts_of_requests_that_fit_no_page_are_refused(server, url, left_out) -> None:
    with HttpReplica(url, "secret") as replica:
        server.answer = (200, {"requests": [], "left": 0, "stored": 0, "left_out": left_out})
        with pytest.raises(EngineError, match="bytes that are none"):
            replica.take_requests()


SCHEMA = FeatureSchema(layers=(1, 3), hidden_size=4, dtype="bfloat16")
KEY = "ab" * 8


def test_states_of_a_request_come_piece_by_piece(server, url, monkeypatch) -> None:
    monkeypatch.setattr(served_states, "PIECE_BYTES", 3 * (4 + SCHEMA.bytes_per_token()))
    with HttpReplica(url, "secret") as replica:
        pieces = [
            (200, bytes([number]) * 4 * num + bytes([100 + number]) * 16 * num)
            for number, num in enumerate((3, 3, 2))
        ]
        server.pieces = iter(pieces)
        rows = replica.take_states(KEY, 8, SCHEMA)
        assert not isinstance(rows, str)
        assert rows.token_ids == bytes([0] * 12 + [1] * 12 + [2] * 8)
        assert rows.states == bytes([100] * 48 + [101] * 48 + [102] * 32)
        firsts = [json.loads(body)["first"] for _, path, body in server.asked if path.endswith("states")]
        assert firsts == [0, 3, 6]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ((410, {"left_out": "prefix_hit"}), "prefix_hit"),
        ((410, {"left_out": "the text of a request"}), EngineError),
        ((200, b"short"), EngineError),
        ((200, bytes(1 << 20)), EngineError),
        ((409, {"error": "no"}), EngineError),
        ((500, b"?"), EngineError),
    ],
)
def test_what_is_no_state_is_never_taken_for_one(server, url, answer, found) -> None:
    with HttpReplica(url, "secret") as replica:
        server.answer = answer
        if isinstance(found, str):
            assert replica.take_states(KEY, 8, SCHEMA) == found
            return
        with pytest.raises(found) as caught:
            replica.take_states(KEY, 8, SCHEMA)
    assert "text of a request" not in str(caught.value)


def test_a_server_says_what_it_captures_or_why_it_does_not(server, url) -> None:
    with HttpReplica(url, "secret") as replica:
        server.answer = (200, {"layers": [1, 3], "hidden_size": 4, "dtype": "bfloat16"})
        assert replica.states_schema() == SCHEMA
        server.answer = (409, {"error": "this server captures no states"})
        with pytest.raises(ConfigError, match="has no states of requests: this server captures no states"):
            replica.states_schema()
        for wrong in ((200, {"layers": [3, 1], "hidden_size": 4, "dtype": "bfloat16"}), (404, b"?")):
            server.answer = wrong
            with pytest.raises(EngineError, match="bytes that are none"):
                replica.states_schema()
