"""An SGLang captures the states of the requests that it serves; a draft learns from them without a second target."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE, HttpReplica
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE
from spec_trainer.cli.app import run

from .page_server import PageServer, shell_block
from .served_states import answered, answers_of, captured
from .sglang_here import ARGS, needs_sglang, sglang_environment  # noqa: F401 (a fixture)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .conftest import Trained

pytestmark = [
    *needs_sglang,
    pytest.mark.slow,
    pytest.mark.usefixtures("sglang_environment"),
    pytest.mark.xdist_group("sglang states"),
    pytest.mark.timeout(1200),
]

START_S = 400.0
NUM_TOKENS = 40
NUM_REQUESTS = 200
CONCURRENCY = 16
CHUNK = 64
OWN = ("warm_up", "no_http")
"""Causes by which SGLang's own requests are counted."""
SETTING = {"share": 1.0, "states_bytes": 64 << 20}


@pytest.fixture
def start_server(sglang_environment, tmp_path, monkeypatch) -> Iterator[Callable[..., PageServer]]:  # noqa: F811
    """Starts the page's command with a prefix cache, prompts in chunks, and a retraction in every 20 passes."""
    servers: list[PageServer] = []
    here = {
        **{name: value for name, value in ARGS.items() if name != "disable_radix_cache"},
        "dtype": "float32",
        "chunked-prefill-size": CHUNK,
    }
    monkeypatch.setenv(LIVE_REQUESTS_VARIABLE, json.dumps(SETTING))
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "20")

    def start(target: Path, draft: Path) -> PageServer:
        command = shell_block("sglang.launch_server")
        servers.append(PageServer(command, tmp_path, target, draft, draft, here))
        servers[-1].wait_ready(START_S)
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ask(
    server: PageServer, prompt: list[int], patience_s: float = 240.0, num_tokens: int = NUM_TOKENS
) -> list[int] | None:
    """Return the answer to a prompt, or None if the client has left before it came."""
    sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    asked = {"input_ids": prompt, "sampling_params": sampling}
    return answered(server.port, "/generate", asked, lambda answer: answer["output_ids"], patience_s)


def test_states_of_live_requests_are_those_of_a_fresh_prefill(start_server, trained_draft) -> None:
    """Prefixes are cached, requests are retracted and aborted, and 16 clients ask at once."""
    trained: Trained = trained_draft("eagle3")
    server = start_server(trained.target, trained.folder)
    draw = random.Random(5)
    prefix = [draw.randrange(3, 97) for _ in range(CHUNK)]
    prompts = [[draw.randrange(3, 97) for _ in range(draw.randrange(4, 100))] for _ in range(NUM_REQUESTS)]
    for number in range(0, NUM_REQUESTS, 8):
        prompts[number] = [*prefix, *prompts[number][:30]]
    for number in range(1, NUM_REQUESTS, 4):
        prompts[number] = trained.prompts[number // 2 % 64]

    def of(number: int) -> list[int] | None:
        leaves = number % 10 == 3
        return ask(server, prompts[number], 0.05, 90) if leaves else ask(server, prompts[number])

    with HttpReplica(server.url, server.token) as replica:
        with ThreadPoolExecutor(CONCURRENCY) as clients:
            answers = list(clients.map(of, range(NUM_REQUESTS)))
        time.sleep(2.0)  # aborts arrive
        num_right, causes = captured(replica, trained.target)
        tau = replica.acceptance().acceptance_length
    retractions = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", server.log.read_text())))
    print(f"{num_right} right, {dict(causes)}, {retractions} retractions, tau {tau:.2f}")
    answered = [number for number in range(NUM_REQUESTS) if answers[number] is not None]
    expected = answers_of(trained.target, [prompts[number] for number in answered], NUM_TOKENS)
    assert [answers[number] for number in answered] == expected
    causes -= Counter({cause: causes[cause] for cause in OWN})
    # A client may leave before its request begins, or as it ends.
    assert len(answered) <= num_right + causes["prefix_hit"] + causes["hole"]
    assert num_right + causes["prefix_hit"] + causes["hole"] <= NUM_REQUESTS - causes["unfinished"]
    assert causes["prefix_hit"] >= 10
    assert causes["unfinished"] >= 5
    assert set(causes) <= {"prefix_hit", "unfinished", "hole"}
    assert retractions > 0
    assert tau > 1.05  # it has learnt the answers to some of the prompts
    assert num_right > 100


def test_a_draft_follows_without_a_second_target(
    start_server, make_target, add_characters, tmp_path, monkeypatch
) -> None:
    """The target's answers repeat themselves, so that a draft that has learnt nothing learns from few of them."""
    target = tmp_path / "target"
    made = make_target("llama", hidden_size=64, head_dim=32, initializer_range=0.1)
    shutil.copytree(made, target)
    add_characters(target)
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    (tmp_path / "row.jsonl").write_text(json.dumps(row) + "\n")
    words = ["--target", target, "--data", tmp_path / "row.jsonl", "--output", tmp_path / "fresh"]
    assert run([*map(str, words), "train.steps=1", "train.lr=1e-9", "data.eval_samples=0"]) == 0
    fresh = tmp_path / "fresh" / "draft"
    server = start_server(target, fresh)
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, server.token)
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 97) for _ in range(4)] for _ in range(160)]
    with ThreadPoolExecutor(CONCURRENCY) as clients:
        answers = list(clients.map(lambda prompt: ask(server, prompt), prompts))
    words = ["follow", "--server", server.url, "--target", target, "--draft-model", fresh]
    keys = ["train.lr=3e-3", "train.warmup_steps=5", "train.global_batch_tokens=96"]
    keys += ["follow.held_out=0.25", "follow.requests=160", "follow.capture=serving"]
    assert run([*map(str, words), *keys, "--output", str(tmp_path / "run")]) == 0
    rows = (tmp_path / "run" / "versions.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["version"] == 1, rows
    with ThreadPoolExecutor(CONCURRENCY) as clients:
        again = list(clients.map(lambda prompt: ask(server, prompt), prompts[:40]))
    assert again == answers[:40] == answers_of(target, prompts[:40], NUM_TOKENS)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["left_out"]) <= {"prefix_hit", "same_prompt", "hole", *OWN}
