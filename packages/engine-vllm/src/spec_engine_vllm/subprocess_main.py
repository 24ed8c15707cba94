"""Run vLLM's frontend in a process of its own; vLLM's engine core is a child process of it.

The program answers three kinds of requests. ``run`` runs a batch, and returns ``ids`` and ``gaps`` of each
answer and the ``draft`` that served it. ``counters`` returns acceptance counters. ``draft`` is a call of an
update of the draft's weights.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from spec_core.errors import EngineError
from spec_engine_vllm.acceptance_counts import EngineTotals
from spec_engine_vllm.guess_depths import guess_depths_of
from spec_engine_vllm.image_prompts import ImagePrompts
from spec_engine_vllm.vllm_ranks import EXTENSION, VllmRanks
from spec_kit.hosting import EngineLink, Fields, sum_of_shards
from spec_processes import ending

_NOTED_S = 0.5
"""Maximum number of seconds to wait until another thread has stored the exit code of vLLM's engine core."""

_WITH_IMAGES = 8
"""Maximum number of requests with images that run at once, so that the pixels of few samples are in
memory."""
_PER_REQUEST = "per_request_spec_decode_metrics"
"""vLLM's argument that makes it count the accepted guesses of each request. Version 0.26 does not have it."""


def main() -> int:
    """Run vLLM until the engine's process closes the connection."""
    with EngineLink() as link:
        asyncio.run(_serve(link))
    return 0


async def _serve(link: EngineLink) -> None:
    _check_platform(link.device_type)
    llm = _start(link.arguments)
    closing = threading.Event()
    try:
        await llm.is_sleeping()  # an answer of the engine core: every socket is connected
        _watch_cores(link, closing)
        link.ready(at_once=llm.vllm_config.scheduler_config.max_num_seqs)
        prompts = ImagePrompts(Path(link.arguments["model"]))
        requests = Requests(llm, prompts, may_draft=_may_draft(link.arguments))
        # is_sleeping asks the engine core. If it has stopped, this program sends no sign of life either.
        await link.serve(
            {
                "run": requests.run,
                "counters": requests.counters,
                "draft": requests.draft,
                "frozen": requests.frozen,
            },
            llm.is_sleeping,
            lambda: llm.errored,
        )
    finally:
        closing.set()
        llm.shutdown()


def _check_platform(device_type: str) -> None:
    """Raise EngineError if vLLM chose other hardware. vLLM falls back to the CPU without a warning."""
    from vllm.platforms import current_platform

    if current_platform.device_type != device_type:
        raise EngineError(
            f"vLLM would run on {current_platform.device_type!r} here, the run's backend has devices of type "
            f"{device_type!r}: set backend.name, or install vLLM, or its plugin, for these"
        )


def _start(arguments: dict[str, Any]) -> Any:
    """Return vLLM's AsyncLLM. vLLM may fork, so this process must not have threads yet."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    if (transfer := arguments.get("kv_transfer_config")) is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    elif not _generators_rewind():
        longest = max(arguments["max_num_batched_tokens"], arguments["max_model_len"])
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": longest}
    if _may_draft(arguments) and hasattr(AsyncEngineArgs, _PER_REQUEST):
        arguments[_PER_REQUEST] = "summary"
    # As for a batch of prompts, vLLM chooses how many sequences run at once.
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)


def _may_draft(arguments: dict[str, Any]) -> bool:
    return arguments.get("worker_extension_cls") == EXTENSION


def _generators_rewind() -> bool:
    """Return whether the platform's random generators can be set back to an earlier state.

    vLLM (0.26 and 0.32) sets back the generator of a request with a seed after each chunk of its prompt
    except the last chunk. The CPU's generators cannot be set back, and vLLM would crash. This function does
    not try it on a device, because that would open the device in this process, and vLLM's engine core, which
    is forked from it, could not use the device.
    """
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


class Requests:
    """Runs requests as they arrive; vLLM batches them."""

    def __init__(self, llm: Any, prompts: ImagePrompts, may_draft: bool) -> None:
        """Use vLLM's engine ``llm``. ``may_draft``: whether vLLM speculates."""
        self._llm = llm
        self._prompts = prompts
        self._image_room = asyncio.Semaphore(_WITH_IMAGES)
        self._ranks = VllmRanks(llm, EngineTotals())
        self._is_sampler_right = None if may_draft else True

    async def run(self, message: Fields) -> Fields:
        """Return the ``answers`` to the requests of ``message``, with the ``times`` of tokens if they are wanted."""

        async def answer(index: int, request: Fields) -> Fields:
            async with self._image_room if request["images"] else nullcontext():
                return await self._generate(f"{message['key']}-{index}", request, message["times"])

        answers = (answer(index, request) for index, request in enumerate(message["requests"]))
        return {"answers": await asyncio.gather(*answers)}

    async def counters(self, message: Fields) -> Fields:
        """Return vLLM's acceptance counters since the process started or the draft last changed."""
        return self._ranks.acceptance()

    async def draft(self, message: Fields) -> Fields:
        """Send the ``call`` and the ``argument`` of ``message`` to every rank, between two of vLLM's steps."""
        return await self._ranks.call(message["call"], message["argument"])

    async def frozen(self, message: Fields) -> Fields:
        """Return products with the embedding and the head, summed over ranks; no fields if the model has none."""
        asked = (message["embedding"], message["token_ids"], message["vector"])
        return sum_of_shards(await self._llm.collective_rpc("spec_frozen_products", args=asked))

    async def _generate(self, name: str, request: Fields, is_timed: bool) -> Fields:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if request["sampling"]["temperature"] > 0:
            await self._check_sampler()
        params = SamplingParams(
            **request["sampling"],
            detokenize=False,
            ignore_eos=True,  # stop_token_ids end an answer
            output_kind=RequestOutputKind.DELTA if is_timed else RequestOutputKind.FINAL_ONLY,
        )
        prompt: Fields = {"prompt_token_ids": request["ids"]}
        if request["images"]:
            prompt = await asyncio.to_thread(self._prompts.prompt, request["ids"], request["images"])
        ids: list[int] = []
        times: list[float] = []
        begun = time.perf_counter()
        async for output in self._llm.generate(prompt, params, request_id=name):
            answer = output.outputs[0]
            ids += answer.token_ids
            times += [time.perf_counter() - begun] * (len(answer.token_ids) if is_timed else 0)
        is_captured = "extra_args" in request["sampling"]  # the connector compares its tokens itself
        if request["images"] and not is_captured and list(output.prompt_token_ids) != request["ids"]:
            raise RuntimeError(
                f"vLLM ran {len(output.prompt_token_ids)} tokens for a prompt with images, expected "
                f"{len(request['ids'])}"
            )
        verified = getattr(answer, "spec_decode_metrics", None)  # vLLM 0.26 lacks them
        return {
            "ids": ids,
            "times": times,
            "gaps": [_gap(position) for position in answer.logprobs or ()],
            "accepted": [] if verified is None else list(verified.histogram),
            "depths": guess_depths_of(output),
            "cached": output.num_cached_tokens or 0,
            "draft": [self._ranks.served.version, self._ranks.served.digest],
        }

    async def _check_sampler(self) -> None:
        """Raise RuntimeError if this vLLM is known to sample wrongly with a draft (``sampler_check.py``)."""
        if self._is_sampler_right is None:
            self._is_sampler_right = all(await self._llm.collective_rpc("ensure_sampler_is_right"))
        if not self._is_sampler_right:
            raise RuntimeError(
                "this build of vLLM does not sample from the target's distribution when it drafts; use temperature 0 "
                "or no draft"
            )


def _watch_cores(link: EngineLink, closing: threading.Event) -> None:
    """If a process that vLLM has started ends unexpectedly, report the cause and end this process."""
    cores = {process.sentinel: process for process in multiprocessing.active_children()}

    def watch() -> None:
        ended = wait(list(cores))
        if closing.is_set() or not ended:
            return
        core = cores[ended[0]]  # type: ignore[index]
        link.report(f"vLLM's process {core.name} {ending(_exit_code(core))}")
        os._exit(1)

    threading.Thread(target=watch, name="core watch", daemon=True).start()


def _exit_code(ended: BaseProcess) -> int:
    """Return the exit code of an ended process.

    A thread of vLLM waits for the same process. Only one of the two threads gets the code from the kernel,
    and stores it.
    """
    deadline = time.monotonic() + _NOTED_S
    while (code := ended.exitcode) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return code or 0


def _gap(position: dict[int, Any]) -> float:
    """Return the gap between the two largest logits, which equals the gap of their log-probabilities."""
    first, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
    return first - second


if __name__ == "__main__":
    sys.exit(main())
