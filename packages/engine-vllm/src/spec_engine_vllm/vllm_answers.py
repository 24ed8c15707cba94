"""Collect the token ids of vLLM's answers to requests that are stored for training.

vLLM's engine client yields each answer step by step to its caller. ``keep_answers`` wraps the client to read
the answers.
"""

from __future__ import annotations

import copy
import inspect
import secrets
from collections.abc import AsyncGenerator
from inspect import BoundArguments
from typing import Any

from spec_kit.live_traffic import STATES_ARGUMENT, LiveAnswer, LiveRequests, passed_on

_CONSTRAINTS = ("structured_outputs", "guided_decoding", "allowed_token_ids", "logit_bias", "bad_words")
"""Fields of vLLM's SamplingParams that change the target's distribution. Each version of vLLM has only some
of them."""


def keep_answers(llm: Any, requests: LiveRequests) -> None:
    """Wrap ``generate`` of vLLM's engine client, so that ``requests`` stores the answers that it admits."""
    generate = llm.generate
    signature = inspect.signature(generate)

    def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        seen = None
        with requests.guarded():
            asked = signature.bind(*args, **kwargs)
            seen = _admitted(asked, requests)
            if requests.captures_states:
                _set_mark(asked, None if seen is None else seen.states)
            args, kwargs = asked.args, asked.kwargs
        if seen is None:
            return generate(*args, **kwargs)
        return passed_on(lambda: generate(*args, **kwargs), requests, seen.note, [seen])

    llm.generate = watched


def _admitted(asked: BoundArguments, requests: LiveRequests) -> _Answer | None:
    """Return an object that collects the answer to a request; None if the request must not be stored."""
    if not requests.admits(asked.arguments["request_id"]):
        return None
    if reason := _reason(asked):
        requests.leave_out(reason)
        return None
    states = secrets.token_hex(8) if requests.captures_states else None
    return _Answer(requests, asked.arguments["sampling_params"], states)


def _set_mark(asked: BoundArguments, states: str | None) -> None:
    """Mark a request so that the workers capture its states under the name ``states``.

    None means that they capture no states. A client can set extra arguments, too (``vllm_xargs``), so a mark
    that it has set is removed. The parameters are copied, because requests for several prompts may share
    them.
    """
    params = asked.arguments["sampling_params"]
    extra_args = dict(getattr(params, "extra_args", None) or {})
    if extra_args.pop(STATES_ARGUMENT, None) is None and states is None:
        return
    if states is not None:
        extra_args[STATES_ARGUMENT] = states
    asked.arguments["sampling_params"] = params = copy.copy(params)
    params.extra_args = extra_args


def _reason(asked: BoundArguments) -> str:
    """Return why a request must not be stored; an empty string if it may be stored."""
    sampling, prompt = asked.arguments["sampling_params"], asked.arguments["prompt"]
    kind = prompt.get("type", "token") if isinstance(prompt, dict) else "token"
    has_parts = isinstance(prompt, dict) and (prompt.get("multi_modal_data") or "prompt_embeds" in prompt)
    if kind != "token" or has_parts:
        return "no_text"
    if asked.arguments.get("lora_request") is not None:
        return "adapter"
    if sampling.n > 1:
        return "several_answers"
    return "constrained" if any(getattr(sampling, name, None) for name in _CONSTRAINTS) else ""


class _Answer(LiveAnswer):
    """The tokens of a request and its answer so far."""

    def __init__(self, requests: LiveRequests, sampling: Any, states: str | None) -> None:
        """Begin an answer. ``states``: name of the request's states, if the workers capture them."""
        super().__init__(requests, states)
        self._comes_in_parts = sampling.output_kind.name == "DELTA"
        self._prompt: list[int] = []
        self._tokens: list[int] = []

    def note(self, answer: Any) -> None:
        """Add vLLM's next message of this answer: its new tokens, or all of its tokens so far."""
        (output,) = answer.outputs
        self._prompt = answer.prompt_token_ids or self._prompt
        if self._comes_in_parts:
            self._tokens.extend(output.token_ids)
        else:
            self._tokens = output.token_ids
        if output.finish_reason in ("stop", "length"):
            self.end(self._prompt, self._tokens)
