"""An SGLang that a user has started keeps requests, and a draft follows them."""

import http.client
import itertools
import json
import random
import shlex
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from spec_kit.hosting import DRAFT_TOKEN_VARIABLE, HttpReplica
from spec_kit.live_traffic import LIVE_REQUESTS_VARIABLE
from spec_kit.live_traffic.live_requests import LiveRequest
from spec_trainer.cli.app import run

from ..integration import run_directory
from .own_server import follows_its_own_server
from .page_server import PageServer, shell_block
from .served_states import answers_of, captured
from .sglang_here import ARGS, needs_sglang

pytestmark = [
    *needs_sglang,
    pytest.mark.usefixtures("sglang_environment"),
    pytest.mark.xdist_group("sglang follow"),
    pytest.mark.timeout(600),
]

START_S = 400.0
NUM_REQUESTS = 96
NUM_TOKENS = 40
JSON = {"Content-Type": "application/json"}
SAMPLING = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
FOLLOWED = {"sampling_params": SAMPLING | {"max_new_tokens": NUM_TOKENS}}
LONG = {"input_ids": [9, 9], "sampling_params": SAMPLING | {"max_new_tokens": 200}}
OPENAI = {"model": "served", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = [5, 6, 7]
SETTING = {
    "share": 1.0,
    "states_bytes": 16 << 20,
    "labels": ["code"],
    "routes": ["/generate", "/v1/completions", "/v1/chat/completions"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("follow")


@pytest.fixture(scope="module")
def server(sglang_environment, repeating, untrained, folder) -> Iterator[PageServer]:
    """The server of the page, with what a CPU needs."""
    here = {**ARGS, "dtype": "float32", "served-model-name": "served"}
    (folder / "server").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIVE_REQUESTS_VARIABLE, json.dumps(SETTING))
        server = PageServer(
            shell_block("sglang.launch_server"), folder / "server", repeating, untrained, untrained, here
        )
    try:
        server.wait_ready(START_S)
        yield server
    finally:
        server.close()


def ask(port: int, path: str, fields: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The JSON of an answer, or of the last part of a streamed one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    with closing(connection):
        connection.request("POST", path, json.dumps(fields), JSON | headers)
        answer = connection.getresponse()
        content = answer.read()
    assert answer.status == 200, content
    if fields.get("stream"):
        *_, content, done = filter(None, content.split(b"\n\n"))
        assert done == b"data: [DONE]"
        content = content.removeprefix(b"data: ")
    return json.loads(content)


def greedy(port: int, prompt: list[int], **fields: Any) -> list[int]:
    return ask(port, "/generate", {"input_ids": prompt, "sampling_params": SAMPLING, **fields})["output_ids"]


def hang_up(server: PageServer) -> None:
    """Close the connection of a stream before its end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=240)
    with closing(connection):
        connection.request("POST", "/generate", json.dumps({**LONG, "stream": True}), JSON)
        connection.getresponse().read(16)


def abort(server: PageServer) -> None:
    """Ask for an answer, and have SGLang abort it as soon as it knows the request."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server.port, "/generate", {**LONG, "rid": "aborted"})
        while not asked.done():
            time.sleep(0.1)
            server.ask("POST", "/abort_request", {"rid": "aborted"})
    assert asked.result()["meta_info"]["finish_reason"]["type"] == "abort"


def taken(server: PageServer, count: int) -> tuple[list[LiveRequest], Counter[str]]:
    """Take requests until ``count`` requests in all are stored or left out; return those stored, and the causes."""
    rows: list[LiveRequest] = []
    with HttpReplica(server.url, server.token) as replica:
        for _ in range(480):
            answer = replica.take_requests()
            rows += answer.requests
            causes = Counter(answer.left_out)
            if answer.stored + causes.total() >= count:
                return rows, causes
            time.sleep(0.25)
    raise AssertionError(f"{len(rows)} requests are stored, and left out are {causes}")


def counted(server: PageServer) -> tuple[int, Counter[str]]:
    """Return how many requests were stored or left out, and the causes; what is stored is dropped."""
    with HttpReplica(server.url, server.token) as replica:
        answer = replica.take_requests()
    return answer.stored + sum(answer.left_out.values()), Counter(answer.left_out)


def test_requests_are_stored_however_they_come(server, repeating) -> None:
    """The tokens are those of SGLang's own answers, and its request to itself at its start is left out."""
    count, before = counted(server)
    assert before["warm_up"] == 1
    own = greedy(server.port, PROMPT)
    expected = [(PROMPT, own, "/generate")]
    for fields in ({"stream": True}, {"return_logprob": True, "top_logprobs_num": 2}):
        assert greedy(server.port, PROMPT, **fields) == own
        expected.append((PROMPT, own, "/generate"))
    batch = {"input_ids": [PROMPT, [8, 9]], "sampling_params": SAMPLING}
    parts = ask(server.port, "/generate", batch, **{"x-draft-label": "code"})
    expected += [(PROMPT, own, "code"), ([8, 9], parts[1]["output_ids"], "code")]
    for stream in (False, True):
        ask(server.port, "/v1/completions", {**OPENAI, "prompt": PROMPT, "stream": stream})
        expected.append((PROMPT, own, "/v1/completions"))
    chat = ask(server.port, "/v1/chat/completions", {**OPENAI, "messages": MESSAGES})
    rows, causes = taken(server, count + len(expected) + 1)
    *others, last = [(row.prompt, row.answer, row.label) for row in rows]
    assert sorted(others) == sorted(expected)
    tokenizer = Tokenizer.from_file(str(repeating / "tokenizer.json"))
    assert last[0] == tokenizer.encode("u:hi\na:", add_special_tokens=False).ids
    assert tokenizer.decode(last[1]) == chat["choices"][0]["message"]["content"]
    assert causes == before


def test_other_requests_are_left_out_and_counted(server) -> None:
    count, before = counted(server)
    ask(
        server.port,
        "/generate",
        {"input_ids": PROMPT, "sampling_params": SAMPLING},
        **{"x-draft-learn": "no"},
    )
    greedy(server.port, PROMPT, cache_salt="mine")
    greedy(server.port, PROMPT, extra_key="mine")
    for fields in ({"n": 2}, {"logit_bias": {"7": 3.0}}):
        ask(server.port, "/generate", {"input_ids": PROMPT, "sampling_params": SAMPLING | fields})
    ask(server.port, "/v1/completions", {**OPENAI, "prompt": [PROMPT, [7, 8]], "n": 2})
    ask(server.port, "/v1/chat/completions", {**OPENAI, "messages": MESSAGES, "store": False})
    hang_up(server)
    abort(server)
    rows, causes = taken(server, count + 10)
    assert rows == []
    expected = {"opted_out": 1, "cache_salt": 2, "several_answers": 3, "constrained": 1, "store_false": 1}
    assert causes - before == Counter(**expected, unfinished=2)


def test_states_of_requests_at_once_are_those_of_a_fresh_prefill(server, repeating) -> None:
    """The draft has learnt nothing, so every verification computes rows that the next one must overwrite."""
    _, before = counted(server)
    draw = random.Random(6)
    prompts = [[draw.randrange(3, 97) for _ in range(draw.randrange(1, 60))] for _ in range(16)]
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda prompt: greedy(server.port, prompt, **FOLLOWED), prompts))
    with HttpReplica(server.url, server.token) as replica:
        num_right, causes = captured(replica, repeating)
    assert (num_right, causes) == (len(prompts), before)
    assert answers == answers_of(repeating, prompts, NUM_TOKENS)


def test_a_draft_follows_the_traffic_of_a_server(
    server, repeating, random_rows, untrained, folder, monkeypatch
) -> None:
    """Clients ask all the time, also while the draft is exchanged."""
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 97) for _ in range(4)] for _ in range(160)]
    answers: dict[int, set[tuple[int, ...]]] = {number: set() for number in range(len(prompts))}
    numbers, over = itertools.cycle(range(len(prompts))), threading.Event()

    def client() -> None:
        while not over.is_set():
            number = next(numbers)
            answers[number].add(
                tuple(greedy(server.port, prompts[number], **FOLLOWED, stream=number % 2 == 0))
            )

    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, server.token)
    words = ["--server", server.url, "--target", repeating, "--draft-model", untrained, "--data", random_rows]
    words += ["--output", folder / "run", "--requests", NUM_REQUESTS]
    keys = ["train.lr=3e-3", "train.warmup_steps=5", "train.global_batch_tokens=96", "follow.held_out=0.25"]
    with ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(client) for _ in range(16)]
        try:
            assert run(["follow", *keys, *map(str, words)]) == 0
        finally:
            over.set()
        for one in clients:
            one.result()
        for number, tokens in enumerate(
            pool.map(lambda prompt: greedy(server.port, prompt, **FOLLOWED), prompts[:16])
        ):
            answers[number].add(tuple(tokens))
    verdicts = run_directory.versions(folder / "run")
    version = verdicts[-1]["version"]
    assert version >= 1, verdicts  # how often it pushes depends on how fast the clients are
    with HttpReplica(server.url, server.token) as replica:
        assert replica.first_answer.status.version == version
        assert replica.acceptance().acceptance_length > 1.05  # it was 1.00
    own = answers_of(repeating, prompts, NUM_TOKENS)
    for found, expected in zip(answers.values(), own, strict=True):
        assert found <= {tuple(expected)}
    assert sum(map(len, answers.values())) >= NUM_REQUESTS
    log = server.log.read_text()
    for kept in (prompts[0], own[0][:8]):
        assert ", ".join(map(str, kept)) not in log


@pytest.mark.slow
def test_it_starts_an_sglang_with_the_fresh_draft_and_ends_it(
    repeating, random_rows, tmp_path, monkeypatch
) -> None:
    monkeypatch.delenv("SPEC_TEST_FORKS")  # it starts its processes as a user's does
    flags = {"dtype": "float32", **ARGS}
    arguments = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in flags.items()
    ]
    words = ["--serve", "sglang", "--target", repeating, "--data", random_rows, "--output", tmp_path / "run"]
    keys = [f"follow.serve.arguments={shlex.join(arguments)}"]
    follows_its_own_server(
        [*map(str, words), *keys], tmp_path / "run", lambda port, prompt: greedy(port, prompt, **FOLLOWED)
    )
