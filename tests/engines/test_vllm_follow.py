"""A vLLM that a user has started keeps requests, and a draft follows them."""

import http.client
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE, HttpReplica
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE
from spec_trainer.cli.app import run

from ..integration import run_directory
from .own_server import follows_its_own_server
from .served_states import answers_of
from .user_server import Server
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states")]

NUM_TOKENS = 40


@pytest.fixture
def server(vllm_environment, repeating, untrained, tmp_path, vllm_context, monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, '{"share": 1.0}')
    (tmp_path / "server").mkdir()
    server = Server(repeating, untrained, untrained, tmp_path / "server")
    try:
        server.wait_ready(vllm_context.start_s)
        yield server
    finally:
        server.close()


def ask(port: int, prompt: list[int], learn: str = "", **fields: Any) -> list[int]:
    """The greedy answer to a prompt."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json", **({"x-draft-learn": learn} if learn else {})}
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    body = {"token_ids": prompt, "sampling_params": {**sampling, **fields.pop("sampling", {})}, **fields}
    with closing(connection):
        connection.request("POST", "/inference/v1/generate", json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
    assert answer.status == 200, content
    return json.loads(content)["choices"][0]["token_ids"]


def test_a_draft_follows_the_traffic_of_a_server(
    server, repeating, random_rows, untrained, tmp_path, monkeypatch
) -> None:
    draw = random.Random(3)
    with HttpReplica(server.url, server.token) as replica:
        prompt = [5, 6, 7]
        answer = ask(server.port, prompt)
        ask(server.port, [8, 9], learn="no")
        ask(server.port, [10, 11], cache_salt="mine")
        ask(server.port, [12, 13], sampling={"allowed_token_ids": [20, 21, 22]})
        taken = replica.take_requests()
        assert [(row.prompt, row.answer) for row in taken.requests] == [(prompt, answer)]
        assert taken.left_out == {"opted_out": 1, "cache_salt": 1, "constrained": 1}

        prompts = [[draw.randrange(3, 97) for _ in range(4)] for _ in range(160)]
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda prompt: ask(server.port, prompt), prompts))
        before = replica.acceptance()
        monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, server.token)
        words = ["--server", server.url, "--target", repeating, "--draft-model", untrained]
        words += ["--data", random_rows, "--output", tmp_path / "run", "--requests", 160]
        keys = [
            "train.lr=3e-3",
            "train.warmup_steps=5",
            "train.global_batch_tokens=96",
            "follow.held_out=0.25",
        ]
        assert run(["follow", *keys, *map(str, words)]) == 0
        verdicts = run_directory.versions(tmp_path / "run")
        version = verdicts[-1]["version"]
        assert version >= 1, verdicts
        assert HttpReplica(server.url, server.token).first_answer.status.version == version
        with ThreadPoolExecutor(8) as clients:
            again = list(clients.map(lambda prompt: ask(server.port, prompt), prompts[:40]))
        assert again == answers[:40]
        after = replica.acceptance()
        assert after.acceptance_length > before.acceptance_length + 0.05

    assert answers_of(repeating, prompts[:40], NUM_TOKENS) == answers[:40]
    log = server.log.read_text()
    for kept in (prompts[0], answers[0][:8]):
        assert ", ".join(map(str, kept)) not in log


@pytest.mark.slow
def test_it_starts_a_vllm_with_the_fresh_draft_and_ends_it(
    vllm_environment, repeating, random_rows, tmp_path, monkeypatch
) -> None:
    monkeypatch.delenv("SPEC_TEST_FORKS")  # it starts its processes as a user's does
    arguments = "--max-model-len 256 --tokens-only --gpu-memory-utilization 0.1"
    words = ["--serve", "vllm", "--target", repeating, "--data", random_rows, "--output", tmp_path / "run"]
    follows_its_own_server([*map(str, words), f"follow.serve.arguments={arguments}"], tmp_path / "run", ask)
