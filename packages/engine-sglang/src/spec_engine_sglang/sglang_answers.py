"""Collect the token ids of SGLang's answers to requests that are stored for training.

SGLang's tokenizer manager, in the frontend's process, tokenizes each prompt (``_create_tokenized_object``)
and yields the answer step by step to its caller (``generate_request``). ``store_answers`` wraps both methods.
One call may have several prompts. Versions 0.5.16 to 0.5.23 have these methods, with different fields.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

from spec_core.errors import ConfigError, EngineError
from spec_kit.live_traffic import (
    LIVE_REQUESTS_VARIABLE,
    STATES_ARGUMENT,
    LiveAnswer,
    LiveRequests,
    LiveRequestsConfig,
    passed_on,
)

_CONSTRAINTS = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "logit_bias",
    "watermark",
    "custom_params",
)
"""Fields of SGLang's SamplingParams that change the target's distribution."""
_NO_TEXT = ("mm_inputs", "input_embeds", "positional_embed_overrides")
"""Fields of a tokenized request whose prompt is more than token ids."""
_METHODS = ("generate_request", "_create_tokenized_object")
_RUNNING: ContextVar[dict[str, _Answer]] = ContextVar("running")
"""Admitted answers of the call of ``generate_request`` that this task runs, by request id."""


def check_storing(manager_type: type, server_args: Any) -> None:
    """Raise SpecError if the environment asks this SGLang to store requests, and it cannot store them."""
    config = LiveRequestsConfig.from_environment()
    if config is None:
        return
    if server_args.tokenizer_worker_num > 1:
        raise ConfigError(
            f"with --tokenizer-worker-num above 1 no requests are stored; remove it or {LIVE_REQUESTS_VARIABLE}"
        )
    if missing := [name for name in _METHODS if not hasattr(manager_type, name)]:
        raise EngineError(f"its TokenizerManager has no {missing[0]}; remove {LIVE_REQUESTS_VARIABLE}")


def store_answers(manager: Any, requests: LiveRequests) -> None:
    """Wrap methods of SGLang's tokenizer manager, so that ``requests`` stores the answers that it admits."""
    generate, tokenized_of = (getattr(manager, name) for name in _METHODS)

    def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        running: dict[str, _Answer] = {}

        def begin() -> AsyncGenerator[Any, None]:
            _RUNNING.set(running)
            return generate(*args, **kwargs)

        return passed_on(begin, requests, partial(_note, running), running.values())

    def admitting(asked: Any, *args: Any, **kwargs: Any) -> Any:
        tokenized = tokenized_of(asked, *args, **kwargs)
        with requests.guarded():
            if not hasattr(tokenized, "return_logprob"):
                return tokenized
            if requests.captures_states:
                _remove_mark(tokenized.sampling_params)
            if _admits(manager, requests, tokenized):
                state = manager.rid_to_state[tokenized.rid]
                states = _marked(tokenized.sampling_params) if requests.captures_states else None
                _RUNNING.get()[tokenized.rid] = _Answer(requests, tokenized.input_ids, state, states)
        return tokenized

    manager.generate_request = watched
    manager._create_tokenized_object = admitting


def _remove_mark(sampling: Any) -> None:
    """Remove a client's own mark from a request, because only this process chooses requests to capture."""
    params = sampling.custom_params
    if isinstance(params, dict) and STATES_ARGUMENT in params:
        left = {name: value for name, value in params.items() if name != STATES_ARGUMENT}
        sampling.custom_params = left or None


def _marked(sampling: Any) -> str:
    """Mark a request so that the scheduler captures its hidden states; return the key of the states.

    The mark replaces ``custom_params``. It overwrites nothing, because requests with other ``custom_params``,
    which may change the target's distribution, are not stored.
    """
    states = secrets.token_hex(8)
    sampling.custom_params = {STATES_ARGUMENT: states}
    return states


def _admits(manager: Any, requests: LiveRequests, tokenized: Any) -> bool:
    """Return whether to store a request; if not, count the reason."""
    if not requests.admits(tokenized.rid):
        return False
    # SGLang's status stays "starting" until it has answered its own warm-up request.
    reason = "warm_up" if manager.server_status.name == "Starting" else _reason(tokenized)
    if reason:
        requests.leave_out(reason)
    return not reason


def _reason(tokenized: Any) -> str:
    """Return why a tokenized request must not be stored; an empty string if it may be stored."""
    sampling = tokenized.sampling_params
    if any(getattr(tokenized, name, None) is not None for name in _NO_TEXT):
        return "no_text"
    if tokenized.lora_id is not None:
        return "adapter"
    if sampling.n > 1 or (getattr(sampling, "beam_width", None) or 1) > 1:
        return "several_answers"
    if tokenized.extra_key or getattr(tokenized, "cache_salt", None):
        return "cache_salt"
    if tokenized.session_params is not None:  # the scheduler puts an earlier turn before the prompt
        return "session"
    constrains = [tokenized.custom_logit_processor, *(getattr(sampling, name, None) for name in _CONSTRAINTS)]
    return "constrained" if any(constrains) else ""


def _note(running: Mapping[str, _Answer], message: Any) -> None:
    """Record the next message of a call: a dict about one prompt, or a list with a dict for each prompt."""
    if running:
        for part in message if isinstance(message, list) else [message]:
            if answer := running.get(part["meta_info"]["id"]):
                answer.note(part["meta_info"])


class _Answer(LiveAnswer):
    """The prompt of a request, and SGLang's state of the request, which has the tokens of the answer."""

    def __init__(self, requests: LiveRequests, prompt: Any, state: Any, states: str | None) -> None:
        """Begin to record the answer to one request.

        ``states``: key of the hidden states that the scheduler captures for the request; None if it captures none.
        """
        super().__init__(requests, states)
        self._prompt = prompt
        self._state = state

    def note(self, about: Any) -> None:
        """Record SGLang's information about the answer so far."""
        if (about["finish_reason"] or {}).get("type") not in ("stop", "length"):
            return
        tokens = self._state.output_ids
        if (about["prompt_tokens"], about["completion_tokens"]) == (len(self._prompt), len(tokens)):
            self.end(self._prompt, tokens)
        else:  # the scheduler has cut or extended the prompt
            self.leave_out("other_tokens")
