"""The routes of a vLLM server by which drafts are pushed."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.engine_vllm.played_ranks import COUNTED, NAME, UPDATE, Ranks

from spec_engine_vllm.draft_routes import DraftRoutes

from .asgi import ask, bearer

pytestmark = pytest.mark.usefixtures("counted")


@pytest.fixture
def may_sleep() -> bool:
    """Whether the server has vLLM's ``/sleep``, which is in its development mode alone."""
    return True


@pytest.fixture
def bodies() -> list[str]:
    """Bodies of the requests that vLLM has read."""
    return []


@pytest.fixture
def routes(
    monkeypatch, may_sleep, counted, bodies
) -> Iterator[Callable[..., tuple[int, dict[str, str], Any]]]:
    """``routes(method, path, body, token)``: status, headers and JSON of an answer of one server.

    ``routes(request, …)`` has the answers to several at a time; a completion counts one round.
    """
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "secret")

    async def inner(scope: dict, receive: Callable, send: Callable) -> None:
        counted["rounds"] += scope["path"] == "/v1/completions"
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        bodies.append(body.decode())
        status = 404 if scope["path"] == "/sleep" and not may_sleep else 200
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]}
        )
        await send({"type": "http.response.body", "body": b'"from vLLM"'})

    app = DraftRoutes(inner)
    llm = Ranks("received")

    async def ask_as(method: str, path: str, body: str = "", token: str = "secret") -> list[dict]:
        return await ask(app, path, bearer(token), body=body.encode(), method=method, llm=llm)

    with asyncio.Runner() as runner:

        def read(sent: list[dict]) -> tuple[int, dict, Any]:
            start, end = sent
            headers = {name.decode(): value.decode() for name, value in start["headers"]}
            return start["status"], headers, json.loads(end["body"])

        async def all_of(requests: list[list[str]]) -> list[tuple[int, dict, Any]]:
            return list(map(read, await asyncio.gather(*(ask_as(*request) for request in requests))))

        def answer(*request: Any) -> Any:
            if isinstance(request[0], str):
                return read(runner.run(ask_as(*request)))
            return runner.run(all_of(request))

        yield answer


def test_a_server_behind_a_proxy_with_a_prefix_has_the_routes(monkeypatch) -> None:
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "secret")
    app = DraftRoutes(lambda *_: None)
    asked = ask(
        app, "/spec/draft/status", bearer("secret"), method="GET", llm=Ranks("received"), prefix="/llm"
    )
    start, end = asyncio.run(asked)
    assert (start["status"], json.loads(end["body"])["status"]["state"]) == (200, "received")


def test_answers_name_the_draft_that_was_pushed_until_its_memory_is_given_up(routes) -> None:
    assert "x-draft-version" not in routes("POST", "/v1/completions")[1]
    status, _, answer = routes("POST", "/spec/draft/commit", NAME)
    assert (status, answer["status"]["version"], answer["ranks"]) == (200, 3, 1)
    status, headers, body = routes("POST", "/v1/completions")
    assert (status, body) == (200, "from vLLM")
    assert (headers["x-draft-version"], headers["x-draft-digest"]) == ("3", "d")
    assert routes("POST", "/sleep")[0] == 200
    assert "x-draft-version" not in routes("POST", "/v1/completions")[1]


def test_requests_after_a_revert_share_no_cached_prefix_with_those_before(routes, bodies) -> None:
    asked = [
        ("/v1/completions", '{"prompt": "x"}'),
        ("/v1/completions", "{}"),
        ("/v1/completions", '{"prompt": "x", "cache_salt": "mine"}'),
        ("/v1/completions", "[1]"),
        ("/tokenize", '{"prompt": "x"}'),
    ]
    routes("POST", "/spec/draft/commit", NAME)
    for path, body in asked:
        routes("POST", path, body)
    assert bodies == [body for _, body in asked]
    bodies.clear()
    routes("POST", "/spec/draft/revert", NAME)
    for path, body in asked:
        routes("POST", path, body)
    salt = {"cache_salt": f"draft-{UPDATE.fence}-{UPDATE.number}"}
    assert [json.loads(body) for body in bodies[:2]] == [{**salt, "prompt": "x"}, salt]
    assert bodies[2:] == [body for _, body in asked[2:]]


def test_a_status_is_held_back_until_enough_was_counted_or_its_time_is_over(routes) -> None:
    completion = ["POST", "/v1/completions"]
    question = ["GET", f"/spec/draft/status?rounds={COUNTED['rounds'] + 2}&wait_s="]
    (_, _, held), *_ = routes([question[0], f"{question[1]}30"], completion, completion)
    assert held["acceptance"]["rounds"] == COUNTED["rounds"] + 2
    begun_s = time.monotonic()
    status, _, answer = routes("GET", "/spec/draft/status?rounds=100&wait_s=0.2")
    assert (status, answer["acceptance"]["rounds"]) == (200, COUNTED["rounds"] + 2)
    assert time.monotonic() - begun_s >= 0.2


@pytest.mark.parametrize("state", ["idle", None])
def test_ranks_are_made_ready_before_the_server_has_started(monkeypatch, caplog, state) -> None:
    """Also where there is nothing to make ready, it starts."""
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "secret")
    llm = Ranks(state)

    async def inner(scope: dict, receive: object, send: Callable) -> None:
        await send({"type": "lifespan.startup.complete"})

    async def send(message: dict) -> None:
        llm.calls.append(message["type"])

    app = SimpleNamespace(state=SimpleNamespace(engine_client=llm))
    asyncio.run(DraftRoutes(inner)({"type": "lifespan", "app": app}, None, send))
    assert llm.calls == ["open", "lifespan.startup.complete"]
    assert ("not ready for pushes of a draft: this vLLM serves no draft" in caplog.text) is (state is None)


@pytest.mark.parametrize("may_sleep", [False])
def test_a_sleep_that_vllm_refuses_forgets_nothing(routes) -> None:
    routes("POST", "/spec/draft/commit", NAME)
    assert routes("POST", "/sleep")[0] == 404
    assert routes("POST", "/v1/completions")[1]["x-draft-version"] == "3"


@pytest.mark.parametrize(
    ("request_", "status", "problem"),
    [
        (("GET", "/spec/draft/status", "", "secrets"), 401, "a bearer token is needed"),
        (("GET", "/spec/draft/commit", "", "secret"), 404, "none of status, prepare, commit"),
        (("GET", "/spec/draft/status?rounds=1", "", "secret"), 409, "expected rounds=NUMBER&wait_s=SECONDS"),
        (("GET", "/spec/draft/status?rounds=1&wait_s=31", "", "secret"), 409, "expected 0 to 30 seconds"),
        (("POST", "/spec/draft/other", "", "secret"), 404, "'other' is none of"),
        (("POST", "/spec/draft/commit", "{}", "secret"), 409, "no UpdateId"),
        (("POST", "/spec/draft/prepare", "x" * 100_000, "secret"), 409, "more than 65536 bytes"),
    ],
)
def test_requests_that_are_refused(routes, request_, status, problem) -> None:
    found, _, answer = routes(*request_)
    assert (found, problem in answer["error"]) == (status, True)


def test_without_a_token_of_the_server_nobody_is_admitted(monkeypatch) -> None:
    monkeypatch.delenv("SPEC_DRAFT_TOKEN", raising=False)
    app = DraftRoutes(lambda *_: None)
    sent = asyncio.run(ask(app, "/spec/draft/status", bearer(""), method="GET", llm=Ranks("received")))
    assert sent[0]["status"] == 401
