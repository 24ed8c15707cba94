"""Asks servers, and compares the states that a server keeps of its requests with those of Transformers."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.hosting import HttpReplica
from spec_kit.targets import read_target
from spec_testing import TransformersTarget
from spec_trainer.cli.app import run

from ..integration import run_directory
from .page_server import PageServer
from .trained_drafts import Trained

if TYPE_CHECKING:
    Asks = Callable[..., list[int] | None]
    """Asks a server with a prompt, and tells whether the client leaves early; None if it left before the answer."""

NUM_TOKENS = 40
NUM_REQUESTS = 200
CONCURRENCY = 16


def answers_of(target: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the greedy answers of the target alone."""
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    with HfEngine.create(HfConfig(), read_target(target), context) as engine:
        answers = engine.generate(prompts, SamplingParams(max_new_tokens=num_tokens, stop_at_eos=False))
    return [list(one.token_ids) for one in answers]


def answered(
    port: int,
    path: str,
    fields: dict[str, object],
    read: Callable[[dict[str, Any]], list[int]],
    patience_s: float,
) -> list[int] | None:
    """Return the tokens that ``read`` finds in the answer of a server, or None if the client left before it came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s)
    with closing(connection):
        connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
        try:
            answer = connection.getresponse()
        except TimeoutError:
            return None
        content = answer.read()
    assert answer.status == 200, content
    return read(json.loads(content))


def captured(replica: HttpReplica, target: Path) -> tuple[int, Counter[str]]:
    """Check the states of every stored request against Transformers; return the number of right ones, and causes.

    Each number is within 1e-4 of the largest one of its layer.
    """
    schema, reference = replica.states_schema(), TransformersTarget(target)
    num_right, causes = 0, Counter()
    while True:
        taken = replica.take_requests()
        for request in taken.requests:
            ids = [*request.prompt, *request.answer][:-1]
            rows = replica.take_states(request.states, len(ids), schema)
            if isinstance(rows, str):
                causes[rows] += 1
                continue
            assert torch.frombuffer(bytearray(rows.token_ids), dtype=torch.int32).tolist() == ids
            found_TNH = torch.frombuffer(rows.states, dtype=torch.float32).view(schema.shape(len(ids)))
            expected_TNH = reference.hidden(ids)[:, list(schema.layers)]
            errors_N = (found_TNH - expected_TNH).abs().amax(dim=(0, 2))
            assert (errors_N <= 1e-4 * expected_TNH.abs().amax(dim=(0, 2))).all(), (len(ids), errors_N)
            num_right += 1
        if not taken.left:
            return num_right, causes + Counter(taken.left_out)


def assert_states_of_live_requests(
    server: PageServer, trained: Trained, ask: Asks, prefix_length: int, own: tuple[str, ...] = ()
) -> None:
    """Answers of a busy server are the target's, and the states that it keeps are those of a fresh prefill.

    16 clients ask at once, some leave early, prompts share a prefix that is cached. ``own``: causes by which the
    server's requests to itself are counted.
    """
    draw = random.Random(5)
    prefix = [draw.randrange(3, 97) for _ in range(prefix_length)]
    prompts = [[draw.randrange(3, 97) for _ in range(draw.randrange(4, 100))] for _ in range(NUM_REQUESTS)]
    for number in range(0, NUM_REQUESTS, 8):
        prompts[number] = [*prefix, *prompts[number][:30]]
    for number in range(1, NUM_REQUESTS, 4):
        prompts[number] = trained.prompts[number // 2 % 64]
    with HttpReplica(server.url, server.token) as replica:
        with ThreadPoolExecutor(CONCURRENCY) as clients:
            leaves = (number % 10 == 3 for number in range(NUM_REQUESTS))
            answers = list(clients.map(partial(ask, server), prompts, leaves))
        time.sleep(2.0)  # aborts arrive
        num_right, causes = captured(replica, trained.target)
        tau = replica.acceptance().acceptance_length
    print(f"{num_right} right, {dict(causes)}, tau {tau:.2f}")
    answered = [number for number in range(NUM_REQUESTS) if answers[number] is not None]
    expected = answers_of(trained.target, [prompts[number] for number in answered], NUM_TOKENS)
    assert [answers[number] for number in answered] == expected
    causes -= Counter({cause: causes[cause] for cause in own})
    # A client may leave before its request begins, or as it ends.
    assert len(answered) <= num_right + causes["prefix_hit"] + causes["hole"]
    assert num_right + causes["prefix_hit"] + causes["hole"] <= NUM_REQUESTS - causes["unfinished"]
    assert causes["prefix_hit"] >= 10
    assert causes["unfinished"] >= 5
    assert set(causes) <= {"prefix_hit", "unfinished", "hole"}
    assert tau > 1.05  # it has learnt the answers to some of the prompts
    assert num_right > 100


def random_prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, 97) for _ in range(4)] for _ in range(160)]


def follow_by_kept_states(
    server: PageServer, target: Path, draft: Path, ask: Asks, output: Path
) -> tuple[float, float, set[str]]:
    """A draft learns from the states that the server keeps, and answers stay the target's.

    Return the acceptance length before and after the push, and why requests were left out.
    """
    prompts = random_prompts()
    with HttpReplica(server.url, server.token) as replica, ThreadPoolExecutor(CONCURRENCY) as clients:
        answers = list(clients.map(partial(ask, server), prompts))
        before = replica.acceptance().acceptance_length
        words = ["follow", "--server", server.url, "--target", target, "--draft-model", draft]
        keys = ["train.lr=3e-3", "train.warmup_steps=5", "train.global_batch_tokens=96"]
        keys += ["follow.held_out=0.25", "follow.requests=160", "follow.capture=serving"]
        assert run([*map(str, words), *keys, "--output", str(output)]) == 0
        rows = run_directory.versions(output)
        assert rows[-1]["version"] >= 1, rows
        again = list(clients.map(partial(ask, server), prompts[:40]))
        after = replica.acceptance().acceptance_length
    assert again == answers[:40] == answers_of(target, prompts[:40], NUM_TOKENS)
    print(f"tau {before:.2f} before, {after:.2f} after")
    return before, after, set(run_directory.summary(output)["left_out"])
