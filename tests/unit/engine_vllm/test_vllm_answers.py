"""Answers pass vLLM's frontend as before, and those that are admitted are kept."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from spec_core.errors import ConfigError
from spec_engine_vllm.draft_routes import DraftRoutes
from spec_engine_vllm.vllm_answers import keep_answers
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE, STATES_ARGUMENT, LiveRequests
from spec_kit.live_traffic.live_requests import LiveRequestsConfig

from .asgi import ask, bearer, statuses

ANSWER = [5, 6, 7, 8]
CAPTURING = '{"share": 1.0, "states_bytes": 1024}'


class Client:
    """vLLM's engine client: ``generate`` yields the answer in parts, whole so far, or once."""

    def __init__(self) -> None:
        self.num_closed = 0

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncGenerator[Any, None]:
        try:
            for end in [len(ANSWER)] if sampling_params.output_kind.name == "FINAL_ONLY" else [1, 3, 4]:
                start = {1: 0, 3: 1, 4: 3}[end] if sampling_params.output_kind.name == "DELTA" else 0
                ends = "length" if end == len(ANSWER) else None
                output = SimpleNamespace(token_ids=ANSWER[start:end], finish_reason=ends)
                yield SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[output])
        finally:
            self.num_closed += 1


def sampling(kind: str = "FINAL_ONLY", **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(n=1, output_kind=SimpleNamespace(name=kind), **fields)


PROMPT = {"type": "token", "prompt_token_ids": [1, 2, 3]}


def asked(
    client: Client, requests: LiveRequests, params: Any, prompt: Any = PROMPT, most: int = 9, **fields: Any
) -> list[list[int]]:
    """The answers that come of a request, of which the client takes ``most``."""

    async def receive() -> dict:
        return {"body": b"{}"}

    async def run() -> list[list[int]]:
        await requests.begin({"path": "/", "headers": []}, receive)()
        answers = client.generate(prompt, params, request_id="cmpl-1", **fields)
        found: list[list[int]] = []
        async for answer in answers:
            found.append(answer.outputs[0].token_ids)
            if len(found) == most:
                await answers.aclose()
        return found

    return asyncio.run(run())


@pytest.fixture
def requests() -> LiveRequests:
    return LiveRequests(LiveRequestsConfig(share=1.0), timed=False)


@pytest.fixture
def client(requests) -> Client:
    client = Client()
    keep_answers(client, requests)
    return client


@pytest.mark.parametrize("kind", ["FINAL_ONLY", "DELTA", "CUMULATIVE"])
def test_an_answer_is_kept_however_it_comes(client, requests, kind) -> None:
    assert asked(client, requests, sampling(kind)) == asked(Client(), requests, sampling(kind))
    assert requests.take()["requests"] == [{"prompt": [1, 2, 3], "answer": ANSWER, "label": "other"}]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"params": sampling(structured_outputs={"regex": "a"})}, "constrained"),
        ({"params": sampling(logit_bias={1: 2.0})}, "constrained"),
        ({"params": SimpleNamespace(**{**vars(sampling()), "n": 2})}, "several_answers"),
        ({"params": sampling(), "lora_request": object()}, "adapter"),
        ({"params": sampling(), "prompt": {**PROMPT, "type": "multimodal"}}, "no_text"),
        ({"params": sampling(), "prompt": {"prompt_embeds": object()}}, "no_text"),
        ({"params": sampling("DELTA"), "most": 1}, "unfinished"),
    ],
)
def test_answers_that_are_not_the_targets_own_or_not_whole_are_left_out(
    client, requests, fields, reason
) -> None:
    asked(client, requests, **fields)
    taken = requests.take()
    assert (taken["requests"], taken["left_out"]) == ([], {reason: 1})
    assert client.num_closed == 1


def test_a_failure_of_keeping_is_none_of_the_request(client, requests, monkeypatch) -> None:
    broken = itertools.chain([1], itertools.repeat(0))

    def add(*_: object) -> None:
        next(broken)
        raise MemoryError("the text of a request")

    with monkeypatch.context() as patched:
        patched.setattr(requests, "add", add)
        assert asked(client, requests, sampling()) == [ANSWER]
    assert asked(client, requests, sampling()) == [ANSWER]  # and it recovers
    taken = requests.take()
    assert (len(taken["requests"]), taken["left_out"]) == (1, {"error": 1})


def test_an_error_of_the_engine_reaches_the_client(requests) -> None:
    class Dead(Client):
        async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:
            raise RuntimeError("dead")
            yield

    client = Dead()
    keep_answers(client, requests)
    with pytest.raises(RuntimeError, match="dead"):
        asked(client, requests, sampling())
    assert requests.take()["left_out"] == {"unfinished": 1}


def test_a_server_that_could_not_keep_them_does_not_start(monkeypatch) -> None:
    class Deaf(DraftRoutes):
        keeps_requests = False

    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 1.0}')
    with pytest.raises(ConfigError, match="keeps no requests; remove SPEC_LIVE_REQUESTS"):
        Deaf(lambda *_: None)


def application(monkeypatch: pytest.MonkeyPatch, client: Client, variable: str) -> DraftRoutes:
    """The routes of a server whose engine is ``client``; ``variable``: value of SPEC_LIVE_REQUESTS."""
    monkeypatch.setenv("SPEC_DRAFT_TOKEN", "secret")
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, variable)
    monkeypatch.setattr("spec_engine_vllm.draft_routes.rounds_of", lambda llm: None)
    client.vllm_config = SimpleNamespace(speculative_config=None)
    client.logger_manager = None

    async def inner(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        async for _ in client.generate(PROMPT, sampling(), request_id="cmpl-1"):
            await send({"type": "http.response.start", "status": 200})

    app = DraftRoutes(inner)
    app._asked_s = float("inf")  # the headers of answers are not looked for
    return app


def test_no_client_makes_up_a_label_or_makes_what_is_counted_grow(monkeypatch) -> None:
    client = Client()
    app = application(monkeypatch, client, '{"share": 1.0, "labels": ["code"], "rows": 50}')

    async def run() -> list[dict]:
        asked = [(f"/made-up/{number}", [b"made-up-%d" % number] * (number % 2)) for number in range(2000)]
        asked += [("/v1/completions", [b"made-up" * 100_000])]
        asked += [("/v1/completions", [b"code\r\nmade-up: yes", b"\xff\xfe"])]
        asked += [("/v1/completions", [b"code"]), ("/v1/completions", [])]
        sent = []
        for path, labels in asked:
            sent += await ask(app, path, *((b"x-draft-label", label) for label in labels), llm=client)
        return sent

    assert b"made-up" not in repr(asyncio.run(run())).encode()
    assert app.live_requests is not None
    taken = app.live_requests.take()
    labels = [row["label"] for row in taken["requests"]]
    assert (labels[-2:], set(labels[:-2])) == (["code", "/v1/completions"], {"other"})
    assert (len(labels), taken["left_out"]) == (50, {"overrun": 1954})


@pytest.mark.parametrize("keeps", [True, False])
def test_a_server_gives_them_to_who_knows_the_secret(monkeypatch, keeps) -> None:
    client = Client()
    app = application(monkeypatch, client, '{"share": 1.0}' if keeps else "")

    async def run() -> list[dict]:
        paths = ("/v1/completions", ""), ("/spec/draft/requests", "wrong"), ("/spec/draft/requests", "secret")
        return [
            message for path, token in paths for message in await ask(app, path, bearer(token), llm=client)
        ]

    sent = asyncio.run(run())
    assert statuses(sent) == [200, 401, 200 if keeps else 409]
    assert (b"[5, 6, 7, 8]" in sent[-1]["body"]) is keeps
    assert b"[5" not in b"".join(message.get("body", b"") for message in sent[:-1])


def test_the_workers_capture_an_admitted_request_under_the_name_that_is_stored() -> None:
    requests = LiveRequests(LiveRequestsConfig(share=1.0, states_bytes=1), timed=False)

    class Marked(Client):
        def __init__(self) -> None:
            super().__init__()
            self.marks: list[Any] = []

        async def generate(
            self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None
        ) -> AsyncGenerator[Any, None]:
            self.marks.append(getattr(sampling_params, "extra_args", None))
            async for answer in super().generate(prompt, sampling_params, request_id):
                yield answer

    client, shared = Marked(), sampling(extra_args={"mine": 1})
    keep_answers(client, requests)
    own_mark = sampling(logit_bias={1: 2.0}, extra_args={"mine": 1, STATES_ARGUMENT: "of the client"})
    for params in (shared, shared, sampling(), sampling(logit_bias={1: 2.0}), own_mark):
        assert asked(client, requests, params) == [ANSWER]
    names = [row["states"] for row in requests.take()["requests"]]
    assert len(set(names)) == 3
    assert client.marks == [
        {"mine": 1, STATES_ARGUMENT: names[0]},
        {"mine": 1, STATES_ARGUMENT: names[1]},
        {STATES_ARGUMENT: names[2]},
        None,
        {"mine": 1},
    ]
    assert shared.extra_args == {"mine": 1}, "requests may share their parameters"


@pytest.mark.parametrize(
    ("variable", "asked_for", "status", "body"),
    [
        ("", {}, 409, b"captures no states; start it with states_bytes in SPEC_LIVE_REQUESTS"),
        ('{"share": 1.0}', {}, 409, b"captures no states; start it with states_bytes"),
        (CAPTURING, {}, 200, b'"layers": [1, 3]'),
        (CAPTURING, {"key": "ab" * 8, "first": 0, "rows": 3}, 200, b"\x00\x01"),
        (CAPTURING, {"key": "cd" * 8, "first": 0, "rows": 3}, 410, b'{"left_out": "hole"}'),
        (CAPTURING, {"key": "ef" * 8, "first": 0, "rows": 3}, 409, b"the reason"),
        (CAPTURING, {"key": "../../etc", "first": 0, "rows": 3}, 409, b"no StatesRange"),
        (CAPTURING, {"key": "ab" * 8, "first": 0, "rows": 1 << 40}, 409, b"no StatesRange"),
    ],
)
def test_states_come_from_the_first_worker(monkeypatch, variable, asked_for, status, body) -> None:
    answers = {
        "": {"layers": [1, 3], "hidden_size": 8, "dtype": "float32"},
        "ab": {"piece": b"\x00\x01"},
        "cd": {"left_out": "hole"},
        "ef": {"refused": "the reason"},
    }

    class Workers(Client):
        async def collective_rpc(self, method: str, args: tuple[str]) -> list[Any]:
            assert method == "spec_states"
            return [answers[json.loads(args[0])["key"][:2] if args[0] else ""], None]

    client, asked = Workers(), json.dumps(asked_for).encode()
    app = application(monkeypatch, client, variable)

    def answer(token: str) -> tuple[int, bytes]:
        start, end = asyncio.run(ask(app, "/spec/draft/states", bearer(token), body=asked, llm=client))
        return start["status"], end["body"]

    assert answer("guess")[0] == 401
    found = answer("secret")
    assert found[0] == status
    assert body in found[1]
