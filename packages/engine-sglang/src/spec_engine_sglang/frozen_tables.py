"""Answer for products with the target's embedding and head, in the scheduler of an SGLang that captures.

A call is sent as SGLang's own request for the scheduler's internal state, whose id contains the call, as in
``scheduler_updates``. SGLang broadcasts it to every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from spec_core.errors import EngineError
from spec_kit.hosting import Fields

_MARK = "spec-frozen:"
_ANSWER = "spec_frozen"
"""Key of the answer in the scheduler's internal state."""


async def ask_products(manager: Any, message: Fields) -> Fields:
    """Return the products that SGLang's schedulers compute; ``manager``: SGLang's tokenizer manager."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    asked = json.dumps([message["embedding"], message["token_ids"], message["vector"]])
    manager.auto_create_handle_loop()
    outputs = await manager.get_internal_state_communicator(GetInternalStateReq(rid=_MARK + asked))
    answer = outputs[0].internal_state.get(_ANSWER)
    if answer is None:
        raise EngineError("SGLang's scheduler runs without the plugin of spec-engine-sglang")
    return answer


def answer_products(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Answer a call for products; wraps ``Scheduler.get_internal_state``."""
    if not (request.rid or "").startswith(_MARK):
        return original(scheduler, request)
    import torch.distributed as dist
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    from spec_kit.hosting import shard_products, sum_of_shards

    embedding, token_ids, vector = json.loads(request.rid.removeprefix(_MARK))
    model = scheduler.tp_worker.model_runner.model
    own = shard_products(model, embedding, token_ids, vector, partial(_logits, model))
    shards: list[Fields] = [own] * dist.get_world_size(scheduler.tp_cpu_group)
    if len(shards) > 1:
        dist.all_gather_object(shards, own, group=scheduler.tp_cpu_group)
    return GetInternalStateReqOutput(internal_state={_ANSWER: sum_of_shards(shards)})


def _logits(model: Any, head: Any, states_RH: Any) -> Any:
    """Return the logits of this rank's rows, as SGLang computes them."""
    compute = getattr(model.logits_processor, "_compute_lm_head", None)  # since some version after 0.5.16
    return head.quant_method.apply(head, states_RH) if compute is None else compute(states_RH, head, None)
