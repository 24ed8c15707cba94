"""A vLLM captures the states of the requests that it serves, and a draft learns from them without a second target."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE, HttpReplica
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE
from spec_trainer.cli.app import run

from .page_server import PageServer, shell_block
from .served_states import answered, answers_of, captured
from .vllm_here import needs_vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .conftest import Trained

pytestmark = [*needs_vllm, pytest.mark.xdist_group("states")]

NUM_TOKENS = 40
CONCURRENCY = 16
STATES = json.dumps({"share": 1.0, "states_bytes": 64 << 20})
BLOCK = 32
"""Tokens of a block of vLLM's cache."""


class Server(PageServer):
    """The page's command, with a prefix cache, prompts in chunks, and too few blocks for all requests at once."""

    def __init__(self, target: Path, draft: Path, folder: Path, method: str = "eagle3") -> None:
        here = {
            "dtype": "float32",
            "max-model-len": 200,
            "enforce-eager": True,
            "tokens-only": True,
            "kv-cache-memory-bytes": 64 << 20,
            "block-size": BLOCK,
            "num-gpu-blocks-override": 24,
            "max-num-batched-tokens": 2 * BLOCK,
            "max-num-seqs": CONCURRENCY,
        }
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


def ask(server: Server, prompt: list[int], patience_s: float = 120.0, **sampling: Any) -> list[int] | None:
    """Return the answer to a prompt, or None if the client has left before it came."""
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
    asked = {"token_ids": prompt, "sampling_params": fields}
    path = "/inference/v1/generate"
    return answered(server.port, path, asked, lambda answer: answer["choices"][0]["token_ids"], patience_s)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_states_of_live_requests_are_those_of_a_fresh_prefill(name, trained_draft, start_server) -> None:
    """Prefixes are cached, requests are preempted and aborted, and 16 clients ask at once."""
    trained: Trained = trained_draft(name)
    server = start_server(trained.target, trained.folder, name)
    draw = random.Random(5)
    prefix = [draw.randrange(3, 97) for _ in range(2 * BLOCK)]
    prompts = [[draw.randrange(3, 97) for _ in range(draw.randrange(4, 100))] for _ in range(200)]
    prompts = [
        [*prefix, *prompt[:30]] if number % 8 == 0 else prompt for number, prompt in enumerate(prompts)
    ]
    prompts = [
        trained.prompts[number // 2 % 64] if number % 4 == 1 else one for number, one in enumerate(prompts)
    ]
    leaving = {number for number in range(200) if number % 10 == 3}

    def of(number: int) -> list[int] | None:
        return ask(server, prompts[number], 0.05 if number in leaving else 120.0)

    with HttpReplica(server.url, server.token) as replica:
        with ThreadPoolExecutor(CONCURRENCY) as clients:
            answers = list(clients.map(of, range(200)))
        time.sleep(1.0)  # aborts arrive
        num_right, causes = captured(replica, trained.target)
        tau = replica.acceptance().acceptance_length
    print(f"{num_right} right, {dict(causes)}, {server.preemptions():g} preemptions, tau {tau:.2f}")
    answered = [number for number in range(200) if answers[number] is not None]
    expected = answers_of(trained.target, [prompts[number] for number in answered], NUM_TOKENS)
    assert [answers[number] for number in answered] == expected
    # A client may leave before its request begins, or as it ends.
    assert len(answered) <= num_right + causes["prefix_hit"] + causes["hole"] <= 200 - causes["unfinished"]
    assert causes["prefix_hit"] >= 10
    assert causes["unfinished"] >= 5
    assert set(causes) <= {"prefix_hit", "unfinished", "hole"}
    assert server.preemptions() > 0
    assert tau > 1.05  # it has learnt the answers to some of the prompts
    assert num_right > 100


@pytest.fixture
def target(make_target) -> Path:
    """A Llama whose answers repeat themselves, so that a draft learns from few of them."""
    return make_target("llama", hidden_size=64, head_dim=32, initializer_range=0.1)


@pytest.fixture
def fresh(target, tmp_path) -> Path:
    """A draft that has learnt nothing, exported by a run of one step."""
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    (tmp_path / "row.jsonl").write_text(json.dumps(row) + "\n")
    words = ["--target", target, "--data", tmp_path / "row.jsonl", "--output", tmp_path / "fresh"]
    assert run([*map(str, words), "train.steps=1", "train.lr=1e-9", "data.eval_samples=0"]) == 0
    return tmp_path / "fresh" / "draft"


def test_a_draft_follows_without_a_second_target(target, fresh, start_server, tmp_path, monkeypatch) -> None:
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 97) for _ in range(4)] for _ in range(160)]
    server = start_server(target, fresh)
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, server.token)
    with HttpReplica(server.url, server.token) as replica:
        with ThreadPoolExecutor(CONCURRENCY) as clients:
            first = list(clients.map(lambda prompt: ask(server, prompt), prompts[:16]))
        num_right, causes = captured(replica, target)
        assert (num_right, causes) == (16, {})

        with ThreadPoolExecutor(CONCURRENCY) as clients:
            answers = list(clients.map(lambda prompt: ask(server, prompt), prompts))
        before = replica.acceptance().acceptance_length
        words = ["follow", "--server", server.url, "--target", target, "--draft-model", fresh]
        keys = ["train.lr=3e-3", "train.warmup_steps=5", "train.global_batch_tokens=96"]
        keys += ["follow.held_out=0.25", "follow.requests=160", "follow.capture=serving"]
        words = [*map(str, words), *keys, "--output", str(tmp_path / "run")]
        assert run(words) == 0
        rows = (tmp_path / "run" / "versions.jsonl").read_text().splitlines()
        assert json.loads(rows[-1])["version"] == 1, rows
        with ThreadPoolExecutor(CONCURRENCY) as clients:
            again = list(clients.map(lambda prompt: ask(server, prompt), prompts[:40]))
        after = replica.acceptance().acceptance_length
    print(f"tau {before:.2f} before, {after:.2f} after")
    assert after > before + 0.05
    assert first == answers[:16] == answers_of(target, prompts[:16], NUM_TOKENS)
    assert again == answers[:40]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["left_out"]) <= {"prefix_hit", "same_prompt"}
