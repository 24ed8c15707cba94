"""Run llama.cpp's server in a process of its own, and hand requests on to it by HTTP.

Its Python package returns no token ids of an answer, and its C++ code ends the process if an assertion fails.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Collection, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spec_core.errors import EngineError
from spec_kit.hosting import EngineLink, Fields

_SAMPLERS = ["temperature", "top_p"]
"""All that samples, in this order: the nucleus is one of the distribution at the temperature."""


def main() -> None:
    """Run the server until the engine closes the connection."""
    with EngineLink() as link:
        slots = link.arguments["slots"]
        server = start_server(link.arguments)
        address = urlsplit(server.listening_address).netloc
        link.ready(at_once=slots)
        with ThreadPoolExecutor(2 * slots) as threads:
            asyncio.run(link.serve({"answer": partial(_answer, address, threads)}))


def start_server(arguments: Fields) -> Any:
    """Return the running server. The draft's file is removed, which the server has mapped."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = arguments["gguf"]
    params.port = 0
    params.n_parallel = arguments["slots"]
    params.n_ctx = arguments["slots"] * arguments["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments["threads"]
    caches = [params]
    if (draft := arguments["draft"]) is not None:
        _speculate(params.speculative, draft, arguments["threads"])
        caches.append(params.speculative.draft)
    if arguments["float32"]:
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        for cache in caches:
            cache.cache_type_k = cache.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    if draft is not None:
        Path(draft["file"]).unlink()
    return server


def _speculate(speculative: Any, draft: Fields, threads: int) -> None:
    import xllamacpp

    options = speculative.draft
    kind = f"COMMON_SPECULATIVE_TYPE_{draft['method'].upper().replace('-', '_')}"
    speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    options.mparams.path = draft["file"]
    options.n_max = draft["tokens"]
    options.n_min = 0
    options.p_min = 0.0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads


async def _answer(address: str, threads: Executor, message: Fields) -> Fields:
    """Answer one request on a thread; the server drops it if the connection is closed."""
    connection = http.client.HTTPConnection(address)
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, answer, connection, message)
    finally:
        if (sock := connection.sock) is not None:  # the request was cancelled, but its thread still reads
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def answer(connection: http.client.HTTPConnection, message: Fields) -> Fields:
    """Return the answer to a request.

    The server guesses no more tokens than an answer may have, and so it is asked for more: the last verification is
    one like the others. It ends an answer at end tokens of its own, which the target's file names. An answer that
    such a token may not end is continued by another request.
    """
    begun = time.perf_counter()
    found = StreamedAnswer()
    most = message["max_new_tokens"]
    ends = set(message["ends"])
    while not found.is_complete(most, ends):
        body = {
            **message["sampling"],
            "prompt": message["ids"] + found.ids,
            "n_predict": most - len(found.ids) + message["drafted"],
            "samplers": _SAMPLERS,
            "stream": True,
            "return_tokens": True,
            "timings_per_token": True,
        }
        found.begin()
        with closing(_parts(connection, body)) as parts:
            for part in parts:
                found.add(part, time.perf_counter() - begun)
                if found.is_complete(most, ends):
                    break
    return found.fields()


@dataclass
class StreamedAnswer:
    """Collects an answer, which comes in one part for each token, with the server's counts of guesses so far."""

    ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    rounds: list[list[int]] = field(default_factory=list)
    """Number of drafted and of accepted guesses of each verification."""
    cached: int = 0
    _drafted: int = 0
    _accepted: int = 0
    _in_round: int = 0
    """Number of tokens of the latest verification that have come."""

    def begin(self) -> None:
        """Begin another request, whose counts begin at 0."""
        self._drafted = self._accepted = 0
        self._in_round = 0

    def add(self, part: Fields, time_s: float) -> None:
        """Add the token of one streamed ``part`` of the answer, which arrived after ``time_s`` seconds."""
        timings = part.get("timings") or {}
        self.cached = max(self.cached, timings.get("cache_n", 0))
        (token,) = part["tokens"]
        self.ids.append(token)
        self.times.append(time_s)
        self.depths.append(self._depth(timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)))
        for entry in part.get("completion_probabilities") or ():
            first, second = (top["logprob"] for top in entry["top_logprobs"][:2])
            self.gaps.append(first - second)

    def _depth(self, drafted: int, accepted: int) -> int:
        """Return which guess was verified at the next token, from the numbers of guesses so far; 0 for none.

        A verification that accepted n guesses yields n + 1 tokens. What comes after them without new guesses was
        computed without a draft.
        """
        if drafted > self._drafted:
            self.rounds.append([drafted - self._drafted, accepted - self._accepted])
            self._drafted = drafted
            self._accepted = accepted
            self._in_round = 0
        self._in_round += 1
        if not self.rounds or self._drafted == 0:
            return 0
        guessed, right = self.rounds[-1]
        return self._in_round if self._in_round <= min(guessed, right + 1) else 0

    def is_complete(self, most: int, ends: Collection[int]) -> bool:
        """Return whether the answer has ``most`` tokens, or ends with one of ``ends``."""
        return len(self.ids) == most or (bool(self.ids) and self.ids[-1] in ends)

    def fields(self) -> Fields:
        """Return the fields of the reply to the engine."""
        names = ("ids", "gaps", "times", "depths", "rounds", "cached")
        return {name: getattr(self, name) for name in names}


def _parts(connection: http.client.HTTPConnection, body: Fields) -> Generator[Fields]:
    """Yield the parts of a streamed answer, each with at most one token.

    Raise EngineError with the server's reason if it refuses the request or fails. The connection is closed at the
    end, also if the caller wants no more parts: the server drops the rest.
    """
    part: Fields = {}
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise EngineError(f"llama.cpp refused a request: {response.read(400).decode(errors='replace')}")
        for line in response:
            if line.startswith((b"data: {", b"error: {")):
                part = json.loads(line[line.index(b"{") :])
                if part.get("tokens"):
                    yield part
    finally:
        connection.close()
    if not part.get("stop"):
        raise EngineError(f"llama.cpp ended an answer early: {part}")


if __name__ == "__main__":
    main()
