"""Update the draft's weights in SGLang's scheduler processes, by functions hooked into SGLang.

A call about the draft is sent as SGLang's own request for the scheduler's internal state, whose id contains the call.
SGLang broadcasts it to every rank and answers it between two iterations of the scheduler.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core import UpdateId
from spec_core.errors import EngineError
from spec_kit.hosting import AnswerCounts, AnswerRounds, DraftRank

if TYPE_CHECKING:
    from spec_engine_sglang.sglang_draft_slot import SglangDraftSlot

log = logging.getLogger(__name__)

ANSWER = "spec_draft"
"""Key of the answer in the scheduler's internal state."""
_MARK = "spec-draft:"
_RANK = "_spec_draft_rank"
"""Name of a scheduler's attribute that holds its DraftRank."""
_ROUNDS = "_spec_draft_rounds"
"""Name of a request's attribute that holds its AnswerRounds."""


class _Requests:
    """Distinguishes requests first scheduled after the draft's last change from earlier requests.

    Earlier requests have keys and values of the previous draft in the KV cache, and so do the prefixes that
    they leave in the prefix cache.
    """

    def __init__(self) -> None:
        self.counts = AnswerCounts()
        """Verifications of requests first scheduled after the draft's last change."""
        self.salt = ""
        """Salt in the prefix-cache keys of these requests; empty until a draft is reverted."""
        self._begun_s = 0.0

    def begin(self, reverted: UpdateId | None) -> None:
        self._begun_s = time.perf_counter()  # SGLang's clock of requests
        self.counts = AnswerCounts()
        if reverted is not None:
            self.salt = f"draft-{reverted.fence}-{reverted.number}"

    def count(self, request: Any, num_correct_drafts: int) -> None:
        if request.time_stats.forward_entry_time > self._begun_s:
            had = getattr(request, _ROUNDS, AnswerRounds())
            setattr(request, _ROUNDS, self.counts.add(had, num_correct_drafts))


_requests = _Requests()


def request_id(call: str, argument: str) -> str:
    """Return a request id that encodes a call of ``DraftRank``."""
    return _MARK + json.dumps([call, argument])


def answer_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Answer a call about the draft; wraps ``Scheduler.get_internal_state``."""
    if not (request.rid or "").startswith(_MARK):
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    call, argument = json.loads(request.rid.removeprefix(_MARK))
    answers = _of_all_ranks(_answer(scheduler, call, argument), scheduler.tp_cpu_group)
    if call in ("commit", "revert") and not any("refused" in answer for answer in answers):
        _requests.begin(UpdateId.decode(argument) if call == "revert" else None)
    drafted = (chosen(scheduler.server_args).speculative_num_draft_tokens or 1) - 1
    state = {ANSWER: {"answers": answers, "acceptance": asdict(_requests.counts.counted(drafted))}}
    return GetInternalStateReqOutput(internal_state=state)


def keep_prefixes_apart(result: None, request: Any, *args: Any, **kwargs: Any) -> None:
    """Keep a request from sharing cached prefixes with requests before the last revert.

    SGLang's hook calls this after ``Req.__init__``.
    """
    if _requests.salt:
        request.extra_key = (request.extra_key or "") + _requests.salt


def count_verification(result: None, request: Any, num_correct_drafts: int) -> None:
    """Count the accepted guesses of a verification.

    SGLang's hook calls this after ``Req.update_spec_correct_drafts_histogram``.
    """
    _requests.count(request, num_correct_drafts)


def forget_draft(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """End any update before SGLang releases the draft's memory.

    This wraps the release, which SGLang begins only when it is idle.
    """
    rank = getattr(updater.scheduler, _RANK, None)
    if rank is not None:
        rank.forget()
    return original(updater, request)


def _answer(scheduler: Any, call: str, argument: str) -> dict[str, str] | None:
    """Return the answer of ``DraftRank.answer``; None if SGLang serves no draft with weights."""
    try:
        if getattr(scheduler.draft_worker, "draft_worker", None) is None:
            return None
        if call not in ("status", "abort", "forget") and scheduler.weight_updater.offload_tags:
            return {"refused": "this SGLang has given up memory; resume it first"}
        return _rank_of(scheduler).answer(call, argument)
    except Exception as error:  # an exception here would end the scheduler and thus the server
        log.exception("draft %s", call)
        return {"refused": f"{type(error).__name__}: {error}"}


def _rank_of(scheduler: Any) -> DraftRank:
    import torch.distributed as dist

    if not hasattr(scheduler, _RANK):
        setattr(scheduler, _RANK, DraftRank(lambda: _slot(scheduler), dist.get_rank(scheduler.tp_cpu_group)))
    return getattr(scheduler, _RANK)


def _slot(scheduler: Any) -> SglangDraftSlot:
    from spec_engine_sglang.sglang_draft_slot import SglangDraftSlot
    from spec_kit.targets import read_target
    from spec_kit.weight_sync import DraftLayout

    arguments = scheduler.server_args
    target = read_target(model_folder(arguments.model_path))
    return SglangDraftSlot(
        scheduler, DraftLayout.of_folder(model_folder(arguments.speculative_draft_model_path), target)
    )


def chosen(arguments: Any) -> Any:
    """Return SGLang's arguments with the values that it has chosen itself.

    SGLang 0.5.16 writes these values into ``arguments``. 0.5.23 keeps them apart.
    """
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view
    except ImportError:
        return arguments
    return resolved_view(arguments)


def model_folder(name: str) -> Path:
    """Return the folder from which SGLang has loaded a model; raise EngineError if it was given by a hub id."""
    if not Path(name).is_dir():
        raise EngineError(
            f"SGLang was started with {name}; fresh weights and states need a model in a folder"
        )
    return Path(name)


def _of_all_ranks(answer: dict[str, str] | None, group: Any) -> list[dict[str, str]]:
    """Return the answers of all ranks that hold a draft; every rank gets all answers."""
    import torch.distributed as dist

    answers: list[dict[str, str] | None] = [answer] * dist.get_world_size(group)
    if len(answers) > 1:
        dist.all_gather_object(answers, answer, group=group)
    return [given for given in answers if given is not None]
