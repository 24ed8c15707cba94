"""Note at which depth vLLM's draft guessed each token, in vLLM's scheduler (``--scheduler-cls``).

The scheduler knows, for each step and request, how many guesses were verified and which tokens they became. The
depths reach the frontend with the last tokens of an answer, in the dict ``kv_transfer_params``, which is the only
field of vLLM's messages that takes values of other code. vLLM 0.26 and 0.32 have these fields and methods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

SCHEDULER = f"{__name__}.noting_scheduler"
"""The name of ``noting_scheduler`` for vLLM's argument ``scheduler_cls``."""
_KEY = "spec_guess_depths"


def noting_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """Return the scheduler that vLLM would choose itself, which also notes guess depths.

    It notes none if vLLM verifies fewer guesses than it schedules (``enable_adaptive_verification``), because
    only its workers know how many.
    """
    chosen = copy.copy(vllm_config.scheduler_config)
    chosen.scheduler_cls = None
    scheduler = chosen.get_scheduler_cls()(vllm_config=vllm_config, **arguments)
    speculation = vllm_config.speculative_config
    if speculation is not None and not getattr(speculation, "enable_adaptive_verification", False):
        drafter = speculation.draft_model_config
        lengths = [scheduler.max_model_len, getattr(drafter, "max_model_len", None)]
        notes = DepthNotes(min(filter(None, lengths)) - speculation.num_speculative_tokens - 1)
        scheduler.update_from_output = notes.around(scheduler.update_from_output)
    return scheduler


def guess_depths_of(output: Any) -> list[int]:
    """Return the guess depth of each token of an answer from its last output; an empty list without a draft."""
    return (output.kv_transfer_params or {}).get(_KEY, [])


class DepthNotes:
    """The guess depths of all answers in progress.

    If a sequence of a step is longer than ``longest``, vLLM's first model runner drafts nothing in this step, and
    guesses token 0 for every request. So guesses from such a step do not count as guesses of the draft.
    """

    def __init__(self, longest: int) -> None:
        """Begin without answers."""
        self._longest = longest
        self._depths: dict[str, list[int]] = {}
        """Request name → depth of each token of its answer so far."""
        self._has_drafted: dict[str, bool] = {}
        """Request name → whether the draft has made guesses in the request's latest step."""

    def around(self, update: Callable[[Any, Any], dict[int, Any]]) -> Callable[[Any, Any], dict[int, Any]]:
        """Return ``Scheduler.update_from_output``, called ``update``, with notes of every step."""

        def noting(scheduled: Any, ran: Any) -> dict[int, Any]:
            messages = update(scheduled, ran)
            self._note(scheduled, [output for message in messages.values() for output in message.outputs])
            return messages

        return noting

    def _note(self, scheduled: Any, outputs: list[Any]) -> None:
        """Note the tokens that a step has yielded, as the outputs say after stop tokens and preemptions."""
        guesses = self._guesses(scheduled)
        for output in outputs:
            name = output.request_id
            count = len(output.new_token_ids)
            depths = self._depths.setdefault(name, [])
            depths += [depth if depth <= guesses.get(name, 0) else 0 for depth in range(1, count + 1)]
            if output.finish_reason is not None:
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), _KEY: depths}
                self._forget(name)
        has_drafted = _longest_sequence(scheduled) <= self._longest
        self._has_drafted |= dict.fromkeys(scheduled.num_scheduled_tokens, has_drafted)
        for name in scheduled.finished_req_ids:  # aborted ones, too
            self._forget(name)

    def _guesses(self, scheduled: Any) -> dict[str, int]:
        """Return how many guesses of the draft a step has verified for each request.

        vLLM may pad a request that a step begins, or resumes after a preemption, with guesses of nobody. Guesses
        that a grammar has refused were not verified either.
        """
        begun = {new.req_id for new in scheduled.scheduled_new_reqs}
        begun |= scheduled.scheduled_cached_reqs.resumed_req_ids
        refused = scheduled.num_invalid_spec_tokens or {}
        return {
            name: len(guesses) - refused.get(name, 0)
            for name, guesses in scheduled.scheduled_spec_decode_tokens.items()
            if name not in begun and self._has_drafted.get(name, False)
        }

    def _forget(self, name: str) -> None:
        self._depths.pop(name, None)
        self._has_drafted.pop(name, None)


def _longest_sequence(scheduled: Any) -> int:
    """Return the largest number of tokens, verified guesses included, of a request in a step."""
    known = scheduled.scheduled_cached_reqs
    computed = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    lengths = (computed[name] + count for name, count in scheduled.num_scheduled_tokens.items())
    return max(lengths, default=0)
