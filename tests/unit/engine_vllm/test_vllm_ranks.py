"""All ranks of vLLM take an update, or none; the routes of a server hand calls on."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from spec_core import ServingStatus, UpdateId
from spec_core.errors import EngineError, ProtocolError
from spec_core.records import AcceptanceCounters
from spec_engine_vllm import acceptance_counts, draft_routes
from spec_engine_vllm.acceptance_counts import EngineTotals
from spec_engine_vllm.draft_routes import DraftRoutes
from spec_engine_vllm.vllm_ranks import VllmRanks

from .asgi import ask, bearer

UPDATE = UpdateId(group="default", fence=1, number=7)
NAME = UPDATE.model_dump_json()
COUNTED: dict[str, Any] = {"rounds": 5, "drafted": 15, "accepted": 6, "accepted_per_position": [4, 2, 0]}


class Ranks:
    """vLLM's engine client, with a worker for each entry of ``states``; ``refusing`` ranks raise at their commit."""

    def __init__(self, *states: str | None, refusing: tuple[int, ...] = ()) -> None:
        self.statuses = [
            None if state is None else ServingStatus(state=state, update=UPDATE) for state in states
        ]
        self.refusing = refusing
        self.calls: list[str] = []

    async def collective_rpc(self, method: str, args: tuple[str, str]) -> list[dict[str, str] | None]:
        assert method == "spec_draft"
        self.calls.append(args[0])
        return [self._answer(rank, *args) for rank in range(len(self.statuses))]

    def _answer(self, rank: int, call: str, argument: str) -> dict[str, str] | None:
        if (status := self.statuses[rank]) is None:
            return None
        if call == "commit" and rank in self.refusing:
            return {"refused": f"rank {rank} cannot"}
        ends = {
            "commit": "committed",
            "revert": "reverted",
            "abort": "aborted",
            "prepare": "prepared",
            "forget": "idle",
        }
        if call == "revert" and status.state != "committed":
            return {"refused": "nothing to revert"}
        if call in ends:
            version = 3 if call == "commit" else None
            self.statuses[rank] = status.model_copy(
                update={"state": ends[call], "version": version, "digest": "d" * bool(version)}
            )
        return {"status": self.statuses[rank].model_dump_json()}


@pytest.fixture(autouse=True)
def counted(monkeypatch) -> dict[str, Any]:
    counted = dict(COUNTED)

    def counters() -> AcceptanceCounters:
        positions = tuple(counted["accepted_per_position"])
        return AcceptanceCounters(**{**counted, "accepted_per_position": positions})

    monkeypatch.setattr(acceptance_counts, "speculation_counters", counters)
    monkeypatch.setattr(draft_routes, "rounds_of", lambda llm: EngineTotals())
    return counted


def call(llm: object, name: str, argument: str = "") -> dict[str, Any]:
    return asyncio.run(VllmRanks(llm, EngineTotals()).call(name, argument))


def test_a_commit_asks_every_rank_first() -> None:
    llm = Ranks("received", None, "received")
    answer = call(llm, "commit", NAME)
    assert llm.calls == ["status", "commit"]
    assert (answer["ranks"], answer["status"]["state"], answer["status"]["version"]) == (2, "committed", 3)


def test_no_rank_commits_what_one_has_not_received() -> None:
    llm = Ranks("received", "aborted")
    with pytest.raises(EngineError, match="update 7 cannot be committed: rank 1 is aborted"):
        call(llm, "commit", NAME)
    assert llm.calls == ["status"]


def test_no_rank_commits_another_update_than_it_has_received() -> None:
    llm = Ranks("received")
    with pytest.raises(EngineError, match="update 8 cannot be committed: at rank 0 another update has"):
        call(llm, "commit", UPDATE.model_copy(update={"number": 8}).model_dump_json())
    assert llm.calls == ["status"]


def test_a_commit_that_one_rank_fails_is_undone_on_the_others() -> None:
    llm = Ranks("received", "received", refusing=(1,))
    with pytest.raises(EngineError, match="rank 1 cannot"):
        call(llm, "commit", NAME)
    assert llm.calls == ["status", "commit", "revert"]
    assert [status and status.state for status in llm.statuses] == ["reverted", "received"]


def test_ranks_that_differ_are_quarantined() -> None:
    assert call(Ranks("received", "idle"), "status")["status"]["state"] == "quarantined"


def test_acceptance_counts_anew_from_a_commit(counted) -> None:
    ranks = VllmRanks(Ranks("received"), EngineTotals())
    assert ranks.acceptance() == asdict(AcceptanceCounters(**COUNTED | {"accepted_per_position": (4, 2, 0)}))
    asyncio.run(ranks.call("commit", NAME))
    assert ranks.acceptance()["rounds"] == 0
    counted.update(rounds=7, accepted_per_position=[5, 3, 1])
    assert ranks.acceptance() == asdict(AcceptanceCounters(rounds=2, accepted_per_position=(1, 1, 1)))


def test_a_change_that_another_frontend_has_made_counts_anew_once_it_is_seen() -> None:
    llm = Ranks("received")
    ranks = VllmRanks(llm, EngineTotals())
    asyncio.run(VllmRanks(llm, EngineTotals()).call("commit", NAME))
    assert ranks.acceptance()["rounds"] == COUNTED["rounds"]
    asyncio.run(ranks.call("status"))
    assert ranks.acceptance()["rounds"] == 0


class Broken:
    async def collective_rpc(self, method: str, args: tuple[str, str]) -> list[None]:
        raise RuntimeError("Call to collective_rpc method failed: no attribute 'spec_draft'")


@pytest.mark.parametrize(
    ("llm", "name", "argument", "error", "message"),
    [
        (Broken(), "status", "", EngineError, "started without --worker-extension-cls spec_engine_vllm"),
        (Ranks(None), "status", "", EngineError, "serves no draft with weights"),
        (Ranks("idle"), "commit", "{}", ProtocolError, "no UpdateId"),
    ],
)
def test_what_cannot_be_done_says_why(llm, name, argument, error, message) -> None:
    with pytest.raises(error, match=message):
        call(llm, name, argument)


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


def test_without_a_token_of_the_server_nobody_is_admitted(routes, monkeypatch) -> None:
    monkeypatch.delenv("SPEC_DRAFT_TOKEN")
    app = DraftRoutes(lambda *_: None)
    assert not app._is_admitted({"headers": [(b"authorization", b"Bearer ")]})
