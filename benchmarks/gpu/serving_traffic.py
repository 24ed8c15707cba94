"""Requests of many kinds to a server, and the states that it keeps of them; ``serving_capture.py``."""

from __future__ import annotations

import http.client
import json
import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

from spec_trainer.live.kept_states import take_states

if TYPE_CHECKING:
    import torch

    from spec_kit.hosting import HttpReplica

log = logging.getLogger("serving-traffic")

CONCURRENCY = 16


def requests_of(number: int, sizes) -> list[dict[str, Any]]:
    """Return requests: prompts, sampling parameters, whether they are streamed, and when the client leaves."""
    draw = random.Random(7)
    vocab = sizes["vocab"]

    def ids(length: int) -> list[int]:
        return [draw.randrange(3, vocab) for _ in range(length)]

    prefix, asked = ids(3 * sizes["block"]), []
    for index in range(number):
        prompt = ids(draw.randrange(4, sizes["prompt"]))
        if index % 8 == 0:
            prompt = [*prefix, *prompt[: sizes["block"]]]
        elif index % 11 == 5 and index > 40:
            prompt = asked[index - 40]["prompt"]
        sampling = {"max_tokens": draw.randrange(2, sizes["answer"]), "temperature": 0.0, "ignore_eos": True}
        if index % 2 and sizes["is_sampled"]:
            sampling |= {"temperature": 1.0, **({"seed": index} if index % 4 == 1 else {})}
        if index % 5 == 2:
            sampling["stop_token_ids"] = ids(vocab // 32)
        leaves_s = draw.uniform(0.01, 0.2) if draw.random() < 0.08 else None
        asked.append({"prompt": prompt, "sampling": sampling, "stream": index % 3 == 1, "leaves_s": leaves_s})
    return asked


class Clients:
    """Sends requests; ``answers`` are the ids, prompts included, of all that were answered."""

    def __init__(self, port: int, asked: list[dict[str, Any]], end_s: float, route: Route) -> None:
        self._route = route
        self._port, self._asked, self._end_s, self._lock = port, asked, end_s, threading.Lock()
        self.counts, self.answers = Counter(), set()

    def ask(self, number: int) -> None:
        request = self._asked[number]
        if time.monotonic() > self._end_s:
            self._count("not_sent")
            return
        try:
            answer = self._answer(request)
        except Exception as error:  # noqa: BLE001 - it is counted
            log.warning("request %d: %s", number, f"{type(error).__name__}: {error}"[:300])
            self._count("failed")
            return
        with self._lock:
            if answer is not None:
                self.answers.add((*request["prompt"], *answer))
        kind = "streamed" if request["stream"] else "answered"
        self._count("left" if answer is None else kind)

    def _count(self, kind: str) -> None:
        with self._lock:
            self.counts[kind] += 1

    def _answer(self, request) -> list[int] | None:
        """Return the answer, or None if the client has left before."""
        fields = self._route.fields(request["prompt"], request["sampling"]) | {"stream": request["stream"]}
        left_s = None if request["leaves_s"] is None else time.monotonic() + request["leaves_s"]
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=request["leaves_s"] or 120.0)
        with closing(connection):
            headers = {"Content-Type": "application/json"}
            try:
                connection.request("POST", self._route.path, json.dumps(fields), headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise RuntimeError(f"status {response.status}: {response.read()[:300]!r}")
                if not request["stream"]:
                    return self._route.all_tokens(json.loads(response.read()))
                return streamed(response, left_s, self._route)
            except TimeoutError:
                if left_s is None:
                    raise
                return None


def streamed(response: http.client.HTTPResponse, left_s: float | None, route: Route) -> list[int] | None:
    answer: list[int] = []
    for line in response:
        if left_s is not None and time.monotonic() > left_s:
            return None
        if line.startswith(b"data: {"):
            answer = route.extended(answer, json.loads(line[6:]))
    return answer


class Route(ABC):
    """The route of a server that takes token ids."""

    path: str

    @abstractmethod
    def fields(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a request. ``sampling``: by vLLM's names."""

    @abstractmethod
    def all_tokens(self, answer: dict[str, Any]) -> list[int]:
        """Return the tokens of an answer that is not streamed."""

    @abstractmethod
    def extended(self, tokens: list[int], part: dict[str, Any]) -> list[int]:
        """Return the tokens of a streamed answer up to and with ``part``."""


class VllmRoute(Route):
    path = "/inference/v1/generate"

    def fields(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        return {"token_ids": prompt, "sampling_params": sampling}

    def all_tokens(self, answer: dict[str, Any]) -> list[int]:
        return answer["choices"][0]["token_ids"]

    def extended(self, tokens: list[int], part: dict[str, Any]) -> list[int]:
        return [
            *tokens,
            *(token for choice in part.get("choices", ()) for token in choice.get("token_ids") or ()),
        ]


class SglangRoute(Route):
    path = "/generate"

    def fields(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        named = {
            "max_new_tokens" if name == "max_tokens" else name: value for name, value in sampling.items()
        }
        named.pop("seed", None)  # SGLang takes a seed only at its start
        return {"input_ids": prompt, "sampling_params": named}

    def all_tokens(self, answer: dict[str, Any]) -> list[int]:
        return answer["output_ids"]

    def extended(self, tokens: list[int], part: dict[str, Any]) -> list[int]:
        return part["output_ids"]  # all tokens so far


class Fetcher:
    """Fetches finished requests and their states, as ``follow`` does."""

    def __init__(self, replica: HttpReplica, schema) -> None:
        self._replica, self._schema = replica, schema
        self.complete: list[tuple[list[int], int, torch.Tensor]] = []
        self.answers: list[list[int]] = []
        self.causes, self.left_out = Counter(), {}
        self._logged_s = time.monotonic()

    def fetch(self) -> None:
        """Fetch what is stored now."""
        while True:
            taken = self._replica.take_requests()
            self.left_out = taken.left_out
            for request in taken.requests:
                states = take_states(self._replica, request, self._schema)
                ids = [*request.prompt, *request.answer]
                self.answers.append(ids)
                if isinstance(states, str):
                    self.causes[states] += 1
                else:
                    self.complete.append((ids[:-1], len(request.prompt), states))
            if not taken.left:
                time.sleep(0.1)
                return

    def log_progress(self, clients: Clients) -> None:
        if time.monotonic() > self._logged_s + 5:
            self._logged_s = time.monotonic()
            log.info(
                "clients %s; %d complete, %s", dict(clients.counts), len(self.complete), dict(self.causes)
            )
