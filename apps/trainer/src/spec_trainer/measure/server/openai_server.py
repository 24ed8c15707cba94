"""OpenAiServer is a client of a running server with OpenAI's HTTP API, such as vLLM or SGLang."""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_core import foreign_errors
from spec_core.errors import EngineError
from spec_core.resource import Resource
from spec_core.wording import one_line, shortened, shown
from spec_kit.live_traffic.live_requests import LEARN_HEADER
from spec_processes.sockets import HttpClient, check_secret
from spec_trainer.measure.evaluation.latency import AnswerTimes
from spec_trainer.measure.server.metrics_reader import read_counters

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from spec_core.records import ServerCounters
    from spec_trainer.measure.server.questions import Question

log = logging.getLogger(__name__)

API_KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the API key that a server started with ``--api-key`` requires."""
_NOT_TO_BE_LEARNT = {LEARN_HEADER: "no"}
"""Headers of each request: ``follow`` must not train on the questions by which its draft is measured."""
_SHORT_ANSWER_S = 30.0
"""Longest time for a request of the list of models or of the metrics, in seconds."""
_LONGEST_PAGE = 1 << 24
"""Largest size of the list of models, and of the page of metrics, in bytes."""
_LONGEST_START, _LONGEST_TOKEN = 1 << 20, 1 << 12
"""Largest size of an answer in bytes: a constant and an amount per token. vLLM sends some 250 per token."""


@dataclass(frozen=True, kw_only=True)
class ServedAnswer:
    """A server's answer to one question."""

    text: str
    num_tokens: int
    times: AnswerTimes | None
    """Arrival times of the answer's chunks; None if the answer has no text, such as because it ends at once."""
    acceptance_length: float | None = None
    """Tokens of one verification of this answer, if the server reports it."""


class OpenAiServer(Resource):
    """A client of a running server; any thread may use it."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Request the model's name from the server at ``url``; no answer may take longer than ``timeout_s``.

        Raise ConfigError for an invalid URL, or an API key that no HTTP header can carry. Raise EngineError
        if no server answers, PluginError if a plugin fails to read its metrics and no other recognizes them.
        """
        self._client = HttpClient(url.rstrip("/").removesuffix("/v1"), _api_key(), _NOT_TO_BE_LEARNT)
        self.url = self._client.url
        self._timeout_s = timeout_s
        self.model = self._first_model()
        self.engine_name: str | None = None
        """Name of the engine that the server runs; None if no plugin recognizes the server's metrics."""
        if (found := self._read_counters()) is not None:
            self.engine_name, _ = found

    def answer(self, question: Question, options: Mapping[str, Any]) -> ServedAnswer:
        """Return the server's answer. ``options``: further fields of the request, such as ``max_tokens``.

        Raise EngineError if the server refuses the request, or if the answer is invalid or too late.
        """
        fields = {
            "model": self.model,
            **question.fields,
            **options,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        longest = _LONGEST_START + _LONGEST_TOKEN * int(options["max_tokens"])
        start = time.perf_counter()
        texts: list[str] = []
        times_s: list[float] = []
        num_tokens = None
        length = None
        for part in self._parts(question.path, json.dumps(fields), longest):
            if text := _text(part):
                texts.append(text)
                times_s.append(time.perf_counter() - start)
            num_tokens = _num_tokens(part, num_tokens)
            length = _acceptance_length(part, length)
        if num_tokens is None:
            raise EngineError(
                f"{self.url} does not count the tokens of its answer: expected usage at "
                "the end of a stream (stream_options.include_usage)"
            )
        times = AnswerTimes(num_tokens=num_tokens, parts_s=times_s) if times_s else None
        return ServedAnswer(text="".join(texts), num_tokens=num_tokens, times=times, acceptance_length=length)

    def counters(self) -> ServerCounters | None:
        """Return the server's counters since its start; None if no plugin recognizes its metrics.

        Raise PluginError if the plugin fails, or returns invalid counters.
        """
        if self.engine_name is None or (found := self._read_counters([self.engine_name])) is None:
            return None
        return found[1]

    def close(self) -> None:
        """Make all current and later requests raise EngineError; any thread may call it."""
        self._client.close()

    def _first_model(self) -> str:
        text = self._page("/v1/models")
        with foreign_errors(EngineError, f"{self.url} has no list of models: it answered {shown(text[:80])}"):
            model = json.loads(text)["data"][0]["id"]
            if not isinstance(model, str):
                raise TypeError(f"expected a name, got {shown(model)}")
            return model

    def _read_counters(self, engines: Sequence[str] | None = None) -> tuple[str, ServerCounters] | None:
        """Return engine and counters as ``read_counters`` does; None also for a server without metrics."""
        try:
            metrics = self._page("/metrics")
        except EngineError:
            return None
        return read_counters(metrics, self.url, engines)

    def _page(self, path: str) -> str:
        limit_s = min(_SHORT_ANSWER_S, self._timeout_s)
        return b"".join(self._client.stream(path, "", limit_s, _LONGEST_PAGE)).decode(errors="replace")

    def _parts(self, path: str, body: str, longest: int) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer as parsed JSON objects, up to the event ``[DONE]``.

        Raise EngineError if the answer is incomplete, invalid or too long.
        """
        with closing(self._client.stream(path, body, self._timeout_s, longest)) as stream:
            for data in _events(stream):
                if data == b"[DONE]":
                    return
                yield self._part(data)
        raise EngineError(f"{self.url} ended an answer in its middle: expected data: [DONE] at the end")

    def _part(self, data: bytes) -> dict[str, Any]:
        problem = f"{self.url} streams what is no part of an answer: {shown(data[:80])}"
        with foreign_errors(EngineError, problem):
            part = json.loads(data)
            if not isinstance(part, dict):
                raise TypeError(f"expected an object, got {type(part).__name__}")
        if (error := part.get("error")) is not None:
            raise EngineError(f"{self.url} failed an answer: {shortened(one_line(json.dumps(error)), 400)}")
        return part


def _api_key() -> str | None:
    key = os.environ.get(API_KEY_VARIABLE) or None
    if key is not None:
        check_secret(key, API_KEY_VARIABLE)
    return key


def _events(stream: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the data of server-sent events. Each event must be one line, as vLLM and SGLang write it."""
    rest = bytearray()
    for data in stream:
        rest += data
        if b"\n" not in data:
            continue
        *lines, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        yield from (line[len(b"data:") :].strip() for line in lines if line.startswith(b"data:"))


def _text(part: Mapping[str, Any]) -> str:
    """Return the text in one event of a streamed completion or chat; reasoning and calls of tools count as text.

    An event may hold several of these, if a server has verified several guesses at once.
    """
    choices = part.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return ""
    found: list[object] = [choice.get("text")]
    delta = choice.get("delta")
    if isinstance(delta, dict):  # vLLM gives reasoning both names, with the same text
        found += [delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                found += [function.get("name"), function.get("arguments")]
    return "".join(text for text in found if isinstance(text, str))


def _num_tokens(part: Mapping[str, Any], before: int | None) -> int | None:
    usage = part.get("usage")
    number = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return number if isinstance(number, int) and 0 <= number < 1 << 31 else before


def _acceptance_length(part: Mapping[str, Any], before: float | None) -> float | None:
    """Return an answer's tokens per verification, from the last part of a server that counts it for each request."""
    metrics = part.get("metrics")
    counted = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(counted, dict) or not counted.get("num_spec_steps"):
        return before
    length = counted.get("mean_acceptance_length")
    return float(length) if isinstance(length, int | float) and 1 <= length < 1 << 31 else before
