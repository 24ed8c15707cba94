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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core.errors import EngineError
from spec_engine_sglang.frozen_tables import ask_products
from spec_engine_sglang.guess_depths import answer_depths
from spec_engine_sglang.image_inputs import ImageInputs
from spec_kit.hosting import EngineLink

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from spec_kit.hosting import DraftRanks, Fields

    Handler = Callable[[Fields], Awaitable[Fields]]


def main() -> None:
    """Run SGLang until the engine closes the connection, then kill this process and SGLang's processes."""
    try:
        with EngineLink() as link:
            import sglang

            engine = sglang.Engine(**link.arguments)
            link.ready(files=files_of(engine.port_args))
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
        "run": partial(_run, engine, inputs, ranks),
        "draft": draft,
        "frozen": partial(ask_products, engine.tokenizer_manager),
    }


async def _run(engine: Any, inputs: ImageInputs, ranks: DraftRanks, message: Fields) -> Fields:
    """Run a batch of requests, if possible in one call, so that the requests share forward passes.

    If the message requests token times or a concurrency, each request is streamed separately.
    """
    if message.get("times") or message.get("concurrency"):
        answers = await _stream_all(engine, message)
    else:
        answers = await _run_at_once(engine, inputs, message)
    for refusal in filter(None, (refusal_of(answer["meta_info"]) for answer in answers)):
        raise EngineError(refusal)
    served = {"draft": [ranks.served.version, ranks.served.digest]}
    return {"answers": [read_answer(answer) | served for answer in answers]}


async def _run_at_once(engine: Any, inputs: ImageInputs, message: Fields) -> list[Fields]:
    items = await asyncio.to_thread(
        lambda: [
            inputs.item(ids, images) for ids, images in zip(message["ids"], message["images"], strict=False)
        ]
    )
    return await engine.async_generate(
        input_ids=message["ids"],
        rid=message["names"],
        sampling_params=[dict(message["sampling"]) for _ in message["ids"]],
        **({"image_data": [[item] for item in items]} if any(items) else {}),
        **({"return_logprob": True, "top_logprobs_num": 2} if message["gaps"] else {}),
    )


async def _stream_all(engine: Any, message: Fields) -> list[Fields]:
    room = asyncio.Semaphore(message["concurrency"] or len(message["ids"]) or 1)

    async def answer(name: str, ids: list[int]) -> Fields:
        async with room:
            return await stream_answer(engine, name, ids, message["sampling"])

    return await asyncio.gather(*map(answer, message["names"], message["ids"]))


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
