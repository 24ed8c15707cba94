"""Runs ``spec-trainer follow --serve`` with a real engine, sends requests to the server and checks what is left."""

import http.client
import os
import random
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE

from ..free_port import free_port
from ..integration import launching, run_directory
from .vllm_here import lives

START_S = 400
NUM_REQUESTS = 160
KEYS = ["train.lr=3e-3", "train.warmup_steps=5", "train.global_batch_tokens=96", "follow.held_out=0.25"]


def follows_its_own_server(
    words: list[str], output: Path, ask: Callable[[int, list[int]], list[int]]
) -> None:
    """Send requests to the server that the command of ``words`` starts, until it ends; ``ask`` gets port and prompt.

    A better draft was pushed, no process is left, and the server's log has no tokens.
    """
    port = free_port()
    environment = os.environ | {LIVE_REQUESTS_VARIABLE: '{"share": 1.0}', DRAFT_TOKEN_VARIABLE: "a secret"}
    command = [*launching.program(), "follow", "--requests", str(NUM_REQUESTS)]
    command += [*KEYS, f"follow.serve.address=127.0.0.1:{port}", *words]
    log, draw = output.with_name("log"), random.Random(8)
    with log.open("wb") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    try:
        deadline = time.monotonic() + START_S
        while f":{port} answers" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        prompts = [[draw.randrange(3, 97) for _ in range(4)] for _ in range(NUM_REQUESTS)]
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda prompt: ask(port, prompt), prompts))
        while process.poll() is None:  # a server may leave out a request
            assert time.monotonic() < deadline + START_S, log.read_text()
            with suppress(OSError, http.client.HTTPException):  # it ends now
                ask(port, [draw.randrange(3, 97) for _ in range(4)])
        assert process.returncode == 0, log.read_text()
    finally:
        process.kill()
    assert len(children) >= 2
    assert not [child for child in children if lives(child)]
    verdicts = run_directory.versions(output)
    assert verdicts[-1]["version"] >= 1, verdicts
    assert ", ".join(map(str, answers[0][:8])) not in (output / "logs" / "server.log").read_text()
