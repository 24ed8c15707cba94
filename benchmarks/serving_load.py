"""A steady load on a server that takes token ids: streams of greedy completions, and when each of their tokens came.

python benchmarks/serving_load.py http://127.0.0.1:8000 '{"streams": 16, "new_tokens": 256, "vocab_size": 512}'

runs until its standard input ends, then prints JSON: for each request its status, the draft that the answer named,
and the time of each of its messages by the clock that every process of this host shares (``time.monotonic``), with
the number of its tokens. ``seed`` draws other prompts, ``rows`` is a file of token ids to
cut them from, and ``headers`` go with each request.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PATHS = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
PROMPT_TOKENS = 32


@dataclass
class Answer:
    """The outcome of one request."""

    begun_s: float
    status: int = 0
    draft_version: str = ""
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    complete: bool = False


def main() -> None:
    """Load the server that the command line names."""
    url, options = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps([asdict(answer) for answer in asyncio.run(load(url, **options))]))


async def load(
    url: str,
    streams: int,
    new_tokens: int,
    vocab_size: int,
    server: str = "vllm",
    prompt_tokens: int = PROMPT_TOKENS,
    seed: str = "",
    rows: str | None = None,
    headers: dict[str, str] | None = None,
) -> list[Answer]:
    """Keep ``streams`` requests under way until standard input ends; return the answers of those that have ended."""
    parts = urlsplit(url)
    over, answers = asyncio.Event(), list[Answer]()
    texts = [] if rows is None else json.loads(Path(rows).read_text())
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())

    async def stream(number: int) -> None:
        draw = random.Random(f"{seed} {number}" if seed else number)
        await asyncio.sleep(number * 0.05)  # they do not end together either
        while not over.is_set():
            prompt = drawn_prompt(draw, texts, prompt_tokens, vocab_size)
            answers.append(Answer(time.monotonic()))
            body = json.dumps(request(server, prompt, new_tokens)).encode()
            head = f"POST {PATHS[server]} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n{more}"
            await ask(parts.hostname or "", parts.port or 80, head, body, answers[-1])

    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: over.set())
    await asyncio.gather(*(stream(number) for number in range(streams)))
    return answers


def drawn_prompt(draw: random.Random, texts: list[list[int]], length: int, vocab_size: int) -> list[int]:
    """Return random tokens, or ``length`` tokens of a random text from a random place on."""
    if not texts:
        return [draw.randrange(vocab_size) for _ in range(length)]
    text = draw.choice(texts)
    start = draw.randrange(max(1, len(text) - length))
    return text[start : start + length]


async def ask(host: str, port: int, head: str, body: bytes, answer: Answer) -> None:
    """Send one request and note when its tokens come."""
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + body)
        answer.status = int((await reader.readline()).split()[1])
        async for line in reader:
            if line.startswith(b"data: {"):
                answer.times_s.append(time.monotonic())
                answer.tokens.append(num_tokens(line, sum(answer.tokens)))
            elif line.startswith(b"data: [DONE]"):
                answer.complete = True
            elif line.lower().startswith(b"x-draft-version:"):
                answer.draft_version = line.split(b":", 1)[1].strip().decode()
    finally:
        writer.close()


def num_tokens(line: bytes, before: int) -> int:
    """Return the number of tokens that a message adds to the ``before`` of its answer.

    Messages of vLLM hold their own tokens; those of SGLang say how many the answer has by now.
    """
    message = json.loads(line[len(b"data: ") :])
    if "meta_info" in message:
        return message["meta_info"]["completion_tokens"] - before
    choices = message.get("choices") or [{}]
    return len(choices[0].get("token_ids") or ())


def request(server: str, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """Return the body of a request, by the names of the server's engine."""
    ids, length = {"vllm": ("token_ids", "max_tokens"), "sglang": ("input_ids", "max_new_tokens")}[server]
    sampling = {length: new_tokens, "temperature": 0.0, "ignore_eos": True}
    return {ids: prompt, "sampling_params": sampling, "stream": True}


if __name__ == "__main__":
    main()
