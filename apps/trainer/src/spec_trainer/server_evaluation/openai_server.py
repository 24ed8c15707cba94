"""OpenAiServer: a running server with OpenAI's routes, as vLLM and SGLang have them, asked by streaming requests."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_core.engine import Engine
from spec_core.errors import ConfigError, EngineError, PluginError
from spec_core.foreign import foreign_errors
from spec_core.plugins import load_each
from spec_core.resource import Resource
from spec_core.wording import one_line, shortened, shown
from spec_processes.sockets import HttpClient
from spec_trainer.evaluation.latency import AnswerTimes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from spec_core.records import ServerCounters
    from spec_trainer.server_evaluation.questions import Question

API_KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key that such servers ask for (``--api-key``), by the name that clients give it."""
_SHORT_ANSWER_S = 30.0
"""Longest time for a list of models, and for metrics."""
_LONGEST_PAGE = 1 << 24
"""Bytes of the largest list of models, and of the largest page of metrics."""
_LONGEST_START, _LONGEST_TOKEN = 1 << 20, 1 << 12
"""Bytes of the largest answer without tokens, and of what a token adds to it; vLLM sends some 250 for one."""


@dataclass(frozen=True, kw_only=True)
class ServedAnswer:
    """A server's answer to one question."""

    text: str
    num_tokens: int
    times: AnswerTimes | None
    """None where the answer has no text, such as one that ends at once."""


class OpenAiServer(Resource):
    """A running server; any thread may ask it."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Ask the server at ``url`` for its model; no answer may take longer than ``timeout_s``.

        Raise ConfigError for another address, or a key that no header can carry; EngineError for no server.
        """
        self._client = HttpClient(url.rstrip("/").removesuffix("/v1"), _api_key())
        self.url, self._timeout_s = self._client.url, timeout_s
        self.model = self._first_model()
        self.engine_name: str | None = None
        """The engine whose metrics the server has; None for a server without metrics that a plugin knows."""
        self._engine_type: type[Engine] | None = None
        self._find_engine()

    def answer(self, question: Question, options: Mapping[str, Any]) -> ServedAnswer:
        """Return the answer. Raise EngineError for a refusal, and for what is no answer or comes too late."""
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
        for part in self._parts(question.path, json.dumps(fields), longest):
            if text := _text(part):
                texts.append(text)
                times_s.append(time.perf_counter() - start)
            num_tokens = _num_tokens(part, num_tokens)
        if num_tokens is None:
            raise EngineError(
                f"{self.url} does not count the tokens of its answer: expected usage at "
                "the end of a stream (stream_options.include_usage)"
            )
        times = AnswerTimes(num_tokens=num_tokens, parts_s=times_s) if times_s else None
        return ServedAnswer(text="".join(texts), num_tokens=num_tokens, times=times)

    def counters(self) -> ServerCounters | None:
        """Return what the server has counted since its start; None where it has no metrics that a plugin knows."""
        if self._engine_type is None:
            return None
        with suppress(EngineError):
            return self._engine_type.server_counters(self._page("/metrics"))
        return None

    def close(self) -> None:
        """End every request under way with EngineError, and each that follows; any thread may call it."""
        self._client.close()

    def _first_model(self) -> str:
        text = self._page("/v1/models")
        with foreign_errors(EngineError, f"{self.url} has no list of models: it answered {shown(text[:80])}"):
            model = json.loads(text)["data"][0]["id"]
            if not isinstance(model, str):
                raise TypeError(f"expected a name, got {shown(model)}")
            return model

    def _find_engine(self) -> None:
        """Find the plugin that knows the server's metrics."""
        with suppress(EngineError):
            metrics = self._page("/metrics")
            for name, engine_type in load_each(Engine):
                if (
                    not isinstance(engine_type, PluginError)
                    and engine_type.server_counters(metrics) is not None
                ):
                    self.engine_name, self._engine_type = name, engine_type

    def _page(self, path: str) -> str:
        limit_s = min(_SHORT_ANSWER_S, self._timeout_s)
        return b"".join(self._client.stream(path, "", limit_s, _LONGEST_PAGE)).decode(errors="replace")

    def _parts(self, path: str, body: str, longest: int) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream, up to the one that ends it."""
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
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            f"environment variable {API_KEY_VARIABLE} cannot be sent; expected printable ASCII without spaces at "
            "its ends"
        )
    return key


def _events(stream: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the data of server-sent events, each of one line, as these servers write them."""
    rest = bytearray()
    for data in stream:
        rest += data
        if b"\n" not in data:
            continue
        *lines, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        yield from (line[len(b"data:") :].strip() for line in lines if line.startswith(b"data:"))


def _text(part: Mapping[str, Any]) -> str:
    """Return the text of a part, of a completion or of a chat; the reasoning of a chat is text, too."""
    choices = part.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return ""
    delta = choice.get("delta")
    places = [(choice, "text")]
    if isinstance(delta, dict):
        places = [(delta, name) for name in ("reasoning_content", "reasoning", "content")]
    found = [place.get(name) for place, name in places]
    return next((text for text in found if isinstance(text, str) and text), "")


def _num_tokens(part: Mapping[str, Any], before: int | None) -> int | None:
    usage = part.get("usage")
    number = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return number if isinstance(number, int) and 0 <= number < 1 << 31 else before
