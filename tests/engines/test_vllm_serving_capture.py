"""A vLLM captures the states of the requests that it serves, and a draft learns from them without a second target."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE, HttpReplica
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE

from .page_server import PageServer, shell_block
from .served_states import (
    CONCURRENCY,
    NUM_TOKENS,
    answered,
    answers_of,
    assert_states_of_live_requests,
    captured,
    follow_by_kept_states,
    random_prompts,
)
from .vllm_here import needs_vllm

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states")]

STATES = json.dumps({"share": 1.0, "states_bytes": 64 << 20})
BLOCK = 32
"""Tokens of a block of vLLM's cache."""


class Server(PageServer):
    """The page's command, with a prefix cache, prompts in chunks, and too few blocks for all requests at once."""

    def __init__(self, target: Path, draft: Path, folder: Path, method: str = "eagle3") -> None:
        here = {
            "dtype": "float32", "max-model-len": 200, "enforce-eager": True, "tokens-only": True,
            "kv-cache-memory-bytes": 64 << 20, "block-size": BLOCK, "num-gpu-blocks-override": 24,
            "max-num-batched-tokens": 2 * BLOCK, "max-num-seqs": CONCURRENCY,
        }  # fmt: skip
        command = shell_block("spec_engine_vllm").replace('"eagle3"', f'"{method}"')
        super().__init__(command, folder, target, draft, draft, here)

    def preemptions(self) -> float:
        _, _, page = self.ask("GET", "/metrics")
        lines = page.decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))


@pytest.fixture
def start_server(vllm_environment, tmp_path, vllm_context, monkeypatch) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*args: Any, variable: str = STATES) -> Server:
        monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, variable)
        folder = tmp_path / f"server-{len(servers)}"
        folder.mkdir()
        servers.append(Server(args[0], args[1], folder, *args[2:]))
        servers[-1].wait_ready(vllm_context.start_s)
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ask(server: Server, prompt: list[int], leaves: bool = False) -> list[int] | None:
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    asked = {"token_ids": prompt, "sampling_params": sampling}
    path, patience_s = "/inference/v1/generate", 0.05 if leaves else 120.0
    return answered(server.port, path, asked, lambda answer: answer["choices"][0]["token_ids"], patience_s)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_states_of_live_requests_are_those_of_a_fresh_prefill(name, trained_draft, start_server) -> None:
    trained = trained_draft(name)
    server = start_server(trained.target, trained.folder, name)
    assert_states_of_live_requests(server, trained, ask, 2 * BLOCK)
    assert server.preemptions() > 0


def test_a_draft_follows_without_a_second_target(
    repeating, untrained, start_server, tmp_path, monkeypatch
) -> None:
    server = start_server(repeating, untrained)
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, server.token)
    prompts = random_prompts()[:CONCURRENCY]
    with HttpReplica(server.url, server.token) as replica, ThreadPoolExecutor(CONCURRENCY) as clients:
        first = list(clients.map(partial(ask, server), prompts))
        assert captured(replica, repeating) == (CONCURRENCY, {})
    assert first == answers_of(repeating, prompts, NUM_TOKENS)
    before, after, left_out = follow_by_kept_states(server, repeating, untrained, ask, tmp_path / "run")
    assert after > before + 0.05
    assert left_out <= {"prefix_hit", "same_prompt"}
