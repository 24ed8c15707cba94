"""Run SGLang's Python engine in a process of its own.

SGLang's shutdown kills every child of its process; this process has no children except SGLang's.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from spec_core.errors import EngineError
from spec_engine_sglang.frozen_tables import ask_products
from spec_engine_sglang.guess_depths import answer_depths
from spec_engine_sglang.image_inputs import ImageInputs
from spec_kit.hosting import DraftRanks, EngineLink, Fields

Handler = Callable[[Fields], Awaitable[Fields]]


def main() -> None:
    """Run SGLang until the engine closes the connection, then kill this process and SGLang's processes."""
    try:
        with EngineLink() as link:
            import sglang

            engine = sglang.Engine(**link.arguments)
            at_once = engine.loop.run_until_complete(most_running(engine.tokenizer_manager))
            link.ready(files=files_of(engine.port_args), at_once=at_once)
            inputs = ImageInputs(Path(link.arguments["model_path"]))
            # In the main thread, because SGLang installs its signal handlers there.
            engine.loop.run_until_complete(link.serve(_handlers(engine, inputs)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)


def _handlers(engine: Any, inputs: ImageInputs) -> dict[str, Handler]:
    from spec_engine_sglang.sglang_ranks import SglangRanks

    ranks = SglangRanks(engine.tokenizer_manager)

    async def draft(message: Fields) -> Fields:
        return await ranks.call(message["call"], message["argument"])

    return {
        "prefill": partial(_prefill, engine, inputs),
        "answer": partial(_answer, engine, ranks),
        "draft": draft,
        "frozen": partial(ask_products, engine.tokenizer_manager),
    }


async def most_running(manager: Any) -> int:
    """Return how many requests SGLang runs at once; ``manager``: its tokenizer manager."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    (output, *_) = await manager.get_internal_state_communicator(GetInternalStateReq())
    return output.internal_state["effective_max_running_requests_per_dp"]


async def _prefill(engine: Any, inputs: ImageInputs, message: Fields) -> Fields:
    """Run the requests of a capture in one call, so that they share forward passes; return their new tokens."""
    items = await asyncio.to_thread(
        lambda: [
            inputs.item(ids, images) for ids, images in zip(message["ids"], message["images"], strict=True)
        ]
    )
    answers = await engine.async_generate(
        input_ids=message["ids"],
        rid=message["names"],
        sampling_params=[dict(message["sampling"]) for _ in message["ids"]],
        **({"image_data": [[item] for item in items]} if any(items) else {}),
    )
    for answer in answers:
        _raise_refusal(answer)
    return {"ids": [answer["output_ids"] for answer in answers]}


async def _answer(engine: Any, ranks: DraftRanks, message: Fields) -> Fields:
    """Answer one request; stream the answer if the times of its tokens are wanted."""
    name, ids, sampling = message["name"], message["ids"], message["sampling"]
    try:
        if message["times"]:
            answer = await stream_answer(engine, name, ids, sampling)
        else:
            options = {"return_logprob": True, "top_logprobs_num": 2} if message["gaps"] else {}
            answer = await engine.async_generate(
                input_ids=ids, rid=name, sampling_params=dict(sampling), **options
            )
    except asyncio.CancelledError:
        engine.tokenizer_manager.abort_request(name)
        raise
    _raise_refusal(answer)
    return read_answer(answer) | {"draft": [ranks.served.version, ranks.served.digest]}


def _raise_refusal(answer: Fields) -> None:
    if refusal := refusal_of(answer["meta_info"]):
        raise EngineError(refusal)


async def stream_answer(engine: Any, name: str, ids: list[int], sampling: Fields) -> Fields:
    """Stream an answer; return SGLang's last message of it, with all of its tokens and their ``times``.

    ``times`` are seconds from the request to each token's arrival. A message has all tokens so far, or only
    the new tokens if the server streams increments. Its token count always includes all tokens.
    """
    tokens: list[int] = []
    times: list[float] = []
    begun = time.perf_counter()
    parts = await engine.async_generate(input_ids=ids, rid=name, sampling_params=dict(sampling), stream=True)
    async for part in parts:
        count = part["meta_info"].get("completion_tokens", len(tokens))
        tokens += part["output_ids"][len(part["output_ids"]) - (count - len(tokens)) :]
        times += [time.perf_counter() - begun] * (len(tokens) - len(times))
        last = part
    return {**last, "output_ids": tokens, "times": times}


def read_answer(answer: Fields) -> Fields:
    """Return the fields of SGLang's answer that the engine uses.

    The fields are the new tokens, the gaps between the two largest logits, the number of verifications that
    accepted 0, 1, … draft tokens, the tokens' guess depths, and the number of cached prompt tokens. SGLang
    counts a verification in full, even if it passes the answer's end.
    """
    about = answer["meta_info"]
    return {
        "ids": answer["output_ids"],
        "gaps": [top[0][0] - top[1][0] for top in about.get("output_top_logprobs") or ()],
        "accepted": about.get("spec_correct_drafts_histogram") or [],
        "depths": list(answer_depths(about, len(answer["output_ids"]))),
        "cached": about.get("cached_tokens") or 0,
        "times": answer.get("times", ()),
    }


def refusal_of(about: Fields) -> str | None:
    """Return the reason for which SGLang aborted a request; None if it did not abort the request."""
    reason = about.get("finish_reason") or {}
    return reason.get("message") or "aborted" if reason.get("type") == "abort" else None


def files_of(port_args: Any) -> list[str]:
    """Return the files that SGLang creates at its start and leaves behind: sockets, and shared memory."""
    ends = re.findall(r"ipc://([^'\"\s,)]+)", repr(port_args))
    instance = getattr(port_args, "instance_id", "")
    boards = Path("/dev/shm").glob(f"sglang_*{instance}*") if instance else ()
    return [*ends, *(str(board) for board in boards)]


if __name__ == "__main__":
    main()
