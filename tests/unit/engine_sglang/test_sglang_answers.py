"""Answers pass SGLang's frontend as before, and those that are admitted are kept."""

import asyncio
import itertools
import sys
from array import array
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from spec_core.errors import ConfigError, EngineError
from spec_engine_sglang.hook import add_routes, register
from spec_engine_sglang.sglang_answers import check_storing, store_answers
from spec_engine_sglang.sglang_ranks import SglangRoutes
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE, STATES_ARGUMENT, LiveRequests, LiveRequestsConfig

ANSWER = [5, 6, 7, 8]
PROMPTS = {"a": [1, 2, 3], "b": [4, 5]}


class Manager:
    """SGLang's tokenizer manager: parts of an answer have the tokens so far, or only new ones; a batch is a list."""

    def __init__(self, status: str = "Up", ends: str = "length", cuts: int = 0, **fields: Any) -> None:
        self.server_status = SimpleNamespace(name=status)
        self.rid_to_state: dict[str, Any] = {}
        self.num_closed = 0
        self.sampling: dict[str, Any] = {}
        """Request -> its sampling parameters, as the scheduler gets them."""
        self._ends, self._cuts, self._fields = ends, cuts, fields

    def _create_tokenized_object(self, asked: Any, rid: str, prompt: list[int]) -> Any:
        sampling = SimpleNamespace(**{"n": 1, "json_schema": None, "custom_params": None, **asked.sampling})
        self.sampling[rid] = sampling
        fields = {"mm_inputs": None, "input_embeds": None, "lora_id": None, "extra_key": None}
        fields |= {"session_params": None, "custom_logit_processor": None, "return_logprob": False}
        ids = array("q", prompt)
        return SimpleNamespace(rid=rid, input_ids=ids, sampling_params=sampling, **{**fields, **self._fields})

    async def generate_request(self, asked: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        self.rid_to_state = {rid: SimpleNamespace(output_ids=[]) for rid in asked.rids}
        states = dict(self.rid_to_state)
        try:
            for rid in asked.rids:
                self._create_tokenized_object(asked, rid, PROMPTS[rid])
                await asyncio.sleep(0)
            for end in [1, 3, 4] if asked.stream else [4]:
                parts = [self._part(rid, states[rid], end, asked) for rid in asked.rids]
                if asked.stream or len(parts) == 1:
                    for part in parts:
                        yield part
                else:
                    yield parts
        finally:
            self.num_closed += 1

    def _part(self, rid: str, state: Any, end: int, asked: Any) -> dict[str, Any]:
        new = ANSWER[len(state.output_ids) : end]
        state.output_ids.extend(new)
        about = {"id": rid, "prompt_tokens": len(PROMPTS[rid]) - self._cuts, "completion_tokens": end}
        about["finish_reason"] = {"type": self._ends} if end == len(ANSWER) else None
        return {"output_ids": new if asked.increments else list(state.output_ids), "meta_info": about}


def asked(
    manager: Manager, requests: LiveRequests, rids: str = "a", most: int = 9, **fields: Any
) -> list[Any]:
    """The messages of a request, of which the client takes ``most``."""
    stream, increments = fields.pop("stream", False), fields.pop("increments", False)
    request = SimpleNamespace(rids=list(rids), stream=stream, increments=increments, sampling=fields)

    async def receive() -> dict:
        return {"body": b"{}"}

    async def run() -> list[Any]:
        await requests.begin({"path": "/generate", "headers": []}, receive)()
        messages = manager.generate_request(request, None)
        found: list[Any] = []
        async for message in messages:
            found.append(message)
            if len(found) == most:
                await messages.aclose()
        return found

    return asyncio.run(run())


@pytest.fixture
def requests() -> LiveRequests:
    return LiveRequests(LiveRequestsConfig(share=1.0), timed=False)


def kept(requests: LiveRequests, **fields: Any) -> Manager:
    manager = Manager(**fields)
    store_answers(manager, requests)
    return manager


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"stream": True, "increments": True}, {"json_schema": None}]
)
@pytest.mark.parametrize("rids", ["a", "ab"])
def test_answers_are_kept_however_they_come(requests, rids, fields) -> None:
    assert asked(kept(requests), requests, rids, **fields) == asked(Manager(), requests, rids, **fields)
    rows = [{"prompt": PROMPTS[rid], "answer": ANSWER, "label": "/generate"} for rid in rids]
    assert requests.take()["requests"] == rows


@pytest.mark.parametrize("fields", [{}, {"custom_params": {STATES_ARGUMENT: "f" * 16}}])
def test_admitted_requests_are_marked_each_with_a_name_of_its_own(fields) -> None:
    """A client cannot choose the name."""
    requests = LiveRequests(LiveRequestsConfig(share=1.0, states_bytes=9), timed=False)
    manager = kept(requests)
    asked(manager, requests, "ab", **fields)
    marks = [manager.sampling[rid].custom_params for rid in "ab"]
    assert marks == [{STATES_ARGUMENT: row["states"]} for row in requests.take()["requests"]]
    assert len({mark[STATES_ARGUMENT] for mark in marks} - {"f" * 16}) == 2


def test_a_clients_mark_of_a_request_that_is_not_admitted_is_removed() -> None:
    requests = LiveRequests(LiveRequestsConfig(share=1.0, states_bytes=9), timed=False)
    manager = kept(requests)
    asked(manager, requests, custom_params={STATES_ARGUMENT: "f" * 16, "thinking_budget": 9})
    assert manager.sampling["a"].custom_params == {"thinking_budget": 9}
    assert requests.take()["left_out"] == {"constrained": 1}


def test_without_states_bytes_no_parameter_is_touched(requests) -> None:
    manager = kept(requests)
    asked(manager, requests)
    assert manager.sampling["a"].custom_params is None


@pytest.mark.parametrize(
    ("manager", "fields", "reason"),
    [
        ({}, {"json_schema": "{}"}, "constrained"),
        ({}, {"logit_bias": {"1": 2.0}}, "constrained"),
        ({}, {"custom_params": {"thinking_budget": 9}}, "constrained"),
        ({"custom_logit_processor": "code"}, {}, "constrained"),
        ({}, {"n": 2}, "several_answers"),
        ({}, {"beam_width": 4}, "several_answers"),
        ({"lora_id": "lora"}, {}, "adapter"),
        ({"mm_inputs": object()}, {}, "no_text"),
        ({"input_embeds": [[0.0]]}, {}, "no_text"),
        ({"extra_key": "tenant"}, {}, "cache_salt"),
        ({"cache_salt": "tenant"}, {}, "cache_salt"),
        ({"session_params": object()}, {}, "session"),
        ({"status": "Starting"}, {}, "warm_up"),
        ({"ends": "abort"}, {"stream": True}, "unfinished"),
        ({"cuts": 1}, {}, "other_tokens"),
        ({}, {"stream": True, "most": 1}, "unfinished"),
    ],
)
def test_answers_that_are_not_the_targets_own_or_not_whole_are_left_out(
    requests, manager, fields, reason
) -> None:
    served = kept(requests, **manager)
    asked(served, requests, **fields)
    taken = requests.take()
    assert (taken["requests"], taken["left_out"]) == ([], {reason: 1})
    assert served.num_closed == 1


def test_an_answer_of_a_batch_that_is_cut_off_is_counted_and_the_other_kept(requests) -> None:
    asked(kept(requests), requests, "ab", stream=True, most=5)
    taken = requests.take()
    assert [row["prompt"] for row in taken["requests"]] == [PROMPTS["a"]]
    assert taken["left_out"] == {"unfinished": 1}


def test_an_embedding_is_not_a_request(requests) -> None:
    class Embedding(Manager):
        def _create_tokenized_object(self, asked: Any, rid: str, prompt: list[int]) -> Any:
            return SimpleNamespace(rid=rid)

    manager = Embedding()
    store_answers(manager, requests)
    asked(manager, requests)
    taken = requests.take()
    assert (taken["requests"], taken["left_out"]) == ([], {})


def test_a_failure_of_keeping_is_none_of_the_request(requests, monkeypatch) -> None:
    broken = itertools.chain([1], itertools.repeat(0))

    def add(*_: object) -> None:
        next(broken)
        raise MemoryError("the text of a request")

    manager, expected = kept(requests), asked(Manager(), requests)
    with monkeypatch.context() as patched:
        patched.setattr(requests, "add", add)
        assert asked(manager, requests) == expected
        patched.setattr(manager, "server_status", None)
        assert asked(manager, requests) == expected
    assert asked(manager, requests) == expected  # and it recovers
    taken = requests.take()
    assert (len(taken["requests"]), taken["left_out"]) == (1, {"error": 2})


def test_an_error_of_sglang_reaches_the_client(requests) -> None:
    class Dead(Manager):
        async def generate_request(self, asked: Any, request: Any = None) -> Any:
            self.rid_to_state = {"a": SimpleNamespace(output_ids=[])}
            self._create_tokenized_object(asked, "a", [1])
            raise ValueError("dead")
            yield

    manager = Dead()
    store_answers(manager, requests)
    with pytest.raises(ValueError, match="dead"):
        asked(manager, requests)
    assert requests.take()["left_out"] == {"unfinished": 1}


@pytest.mark.parametrize(
    ("variable", "workers", "manager", "error", "words"),
    [
        ("", 2, object, None, ""),
        ('{"share": 1.0}', 1, Manager, None, ""),
        ('{"share": 2.0}', 1, Manager, ConfigError, "SPEC_LIVE_REQUESTS"),
        ('{"share": 1.0, "states_bytes": 9}', 1, Manager, None, ""),
        ('{"share": 1.0}', 2, Manager, ConfigError, "tokenizer-worker-num above 1 no requests are stored"),
        (
            '{"share": 1.0}',
            1,
            object,
            EngineError,
            "TokenizerManager has no generate_request; remove SPEC_LIVE",
        ),
    ],
)
def test_a_server_that_cannot_store_requests_is_refused(
    monkeypatch, variable, workers, manager, error, words
) -> None:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, variable)
    arguments = SimpleNamespace(tokenizer_worker_num=workers)
    if error is None:
        check_storing(manager, arguments)
    else:
        with pytest.raises(error, match=words):
            check_storing(manager, arguments)


def test_a_server_that_cannot_store_requests_ends_before_anything_is_launched(monkeypatch) -> None:
    server = SimpleNamespace(TokenizerManager=Manager, app=None)
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", server)
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 0.1, "rows": 0}')
    launched: list[object] = []
    with pytest.raises(SystemExit, match=r"^this SGLang was not started: .*SPEC_LIVE_REQUESTS.*rows"):
        add_routes(lambda **_: launched.append(1), server_args=SimpleNamespace(tokenizer_worker_num=1))
    assert launched == []


def test_an_sglang_without_a_secret_says_that_it_stores_nothing(monkeypatch, caplog) -> None:
    monkeypatch.delenv(DRAFT_TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 0.1}')
    register()
    assert caplog.messages == ["no requests are stored: SPEC_LIVE_REQUESTS needs SPEC_DRAFT_TOKEN, too"]


@pytest.mark.parametrize("variable", ["", '{"share": 1.0}'])
def test_the_routes_are_those_of_every_server_and_states_are_refused_with_what_to_do(
    monkeypatch, variable
) -> None:
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, "secret")
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, variable)
    manager, sent = Manager(), []

    async def inner(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        request = SimpleNamespace(rids=["a"], stream=False, increments=False, sampling={})
        async for _ in manager.generate_request(request):
            await send({"type": "http.response.start", "status": 200})

    app = SglangRoutes(inner, manager)
    app._asked_s = float("inf")  # the headers of answers are not looked for

    async def receive() -> dict:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: dict) -> None:
        sent.append(message)

    async def run() -> None:
        headers = [(b"authorization", b"Bearer secret")]
        for path in ("/generate", "/spec/draft/requests", "/spec/draft/states"):
            await app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)

    asyncio.run(run())
    statuses = [message["status"] for message in sent if message["type"] == "http.response.start"]
    assert statuses == [200, 200 if variable else 409, 409]
    assert (b"[5, 6, 7, 8]" in sent[2]["body"]) is bool(variable)
    assert b"captures no states; start it with states_bytes in SPEC_LIVE_REQUESTS" in sent[4]["body"]
