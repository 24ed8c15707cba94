"""The process that vLLM lives in; its engine core is a child of it.

It is asked to ``run`` a batch of requests (answers: ``ids`` and ``gaps`` of each), and for its ``counters``.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from spec_core.errors import EngineError, PeerLost
from spec_core.hosting.host import answer, give_up
from spec_core.processes.control import BEATS_PER_TIMEOUT
from spec_core.processes.spawn import channel_to_parent

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from multiprocessing.process import BaseProcess

    from spec_core.processes.control import ControlChannel, Record

_SETTLE_S = 1.0
"""For the end of vLLM's engine core to be seen, which says more than what its frontend raises."""
_NOTED_S = 0.5
"""For its exit code to be noted by the thread that was told; less than the above."""


def main() -> int:
    channel = channel_to_parent(*sys.argv[1:])
    order = next(channel.records(), None)
    if order is None:
        return 1
    try:
        asyncio.run(_serve(channel, order))
    except Exception as error:  # noqa: BLE001 (top of a process)
        give_up(channel, error)
        return 1
    return 0


async def _serve(channel: ControlChannel, order: Record) -> None:
    _check_platform(order["device_type"])
    llm = _start(order["arguments"])
    closing = threading.Event()
    try:
        await llm.is_sleeping()  # an answer of the engine core: every socket is connected
        _watch_cores(channel, closing)
        channel.send("ready")
        await Host(channel, llm, order).serve()
    finally:
        closing.set()
        llm.shutdown()


def _check_platform(device_type: str) -> None:
    """vLLM chooses by what it finds installed, and falls back to processors without a word."""
    from vllm.platforms import current_platform

    if current_platform.device_type != device_type:
        raise EngineError(
            f"vLLM would run on {current_platform.device_type!r} here, the run's backend has devices of type "
            f"{device_type!r}: set backend.name, or install vLLM, or its plugin, for these"
        )


def _start(arguments: dict[str, Any]) -> Any:
    """vLLM's AsyncLLM. No thread of ours runs yet: vLLM may fork."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if (transfer := arguments.get("kv_transfer_config")) is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    elif not _generators_rewind():
        longest = max(arguments["max_num_batched_tokens"], arguments["max_model_len"])
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": longest}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def _generators_rewind() -> bool:
    """vLLM (0.26 and 0.32) rewinds the random generator of a request with a seed after each chunk of its prompt but
    the last one. A processor's generators cannot, and it dies of that. (Trying it on a device would open the device
    here, and vLLM's engine core, which is forked, could not.)"""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


class Host:
    """Runs requests as they come; vLLM batches them."""

    def __init__(self, channel: ControlChannel, llm: Any, order: Record) -> None:
        self._channel = channel
        self._llm = llm
        self._peer_s: float = order["peer_s"]
        self._sound = None if "worker_extension_cls" in order["arguments"] else True
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None

    async def serve(self) -> None:
        """Until the channel ends. Raises what vLLM has died of."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="orders", daemon=True).start()
        self._begin(self._pulse())
        await self._ended.wait()
        for task in self._tasks:
            task.cancel()
        if self._failure is not None:
            await asyncio.sleep(_SETTLE_S)
            raise self._failure

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        for record in self._channel.records():
            loop.call_soon_threadsafe(self._obey, record)
        loop.call_soon_threadsafe(self._ended.set)

    def _obey(self, record: Record) -> None:
        work = {"run": self._run, "counters": self._counters}[record["kind"]](record)
        self._begin(answer(self._channel, record, work, lambda: self._llm.errored))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._ended.set()

    async def _run(self, record: Record) -> Record:
        requests = enumerate(record["requests"])
        answers = [self._generate(f"{record['key']}-{index}", request) for index, request in requests]
        return {"answers": await asyncio.gather(*answers)}

    async def _generate(self, name: str, request: Record) -> Record:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if request["sampling"]["temperature"] > 0:
            await self._check_law()
        params = SamplingParams(
            **request["sampling"],
            detokenize=False,
            ignore_eos=True,  # where to stop, we say by stop_token_ids
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": request["ids"]}
        async for output in self._llm.generate(prompt, params, request_id=name):
            said = output.outputs[0]
        return {
            "ids": list(said.token_ids),
            "gaps": [_gap(position) for position in said.logprobs or ()],
        }

    async def _check_law(self) -> None:
        """Raises where this vLLM is known to sample wrongly with a draft (``soundness.py``)."""
        if self._sound is None:
            self._sound = all(await self._llm.collective_rpc("ensure_sound_sampling"))
        if not self._sound:
            raise RuntimeError(
                "this build of vLLM does not sample from the target's law when it drafts; use temperature 0, or no "
                "draft"
            )

    async def _counters(self, record: Record) -> Record:
        return speculation_counters()

    async def _pulse(self) -> None:
        """Tells that vLLM's engine core answers, not only that this process runs: a stopped core goes silent."""
        with suppress(PeerLost):
            while True:
                await asyncio.sleep(self._peer_s / BEATS_PER_TIMEOUT)
                await self._llm.is_sleeping()
                self._channel.send("alive")


def speculation_counters() -> dict[str, Any]:
    """vLLM's own, since the process started."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    prefix = "vllm:spec_decode_num_"
    found = {metric.name.removeprefix(prefix): metric for metric in get_metrics_snapshot()}
    totals = {
        ours: found[theirs].value if theirs in found else 0
        for ours, theirs in (
            ("rounds", "drafts"),
            ("drafted", "draft_tokens"),
            ("accepted", "accepted_tokens"),
        )
    }
    positions = found.get("accepted_tokens_per_pos")
    return {**totals, "accepted_per_position": list(positions.values) if positions else []}


def _watch_cores(channel: ControlChannel, closing: threading.Event) -> None:
    """Ends this process, with the cause, when one that vLLM has started ends before it."""
    cores = {process.sentinel: process for process in multiprocessing.active_children()}

    def watch() -> None:
        ended = wait(list(cores))
        if closing.is_set() or not ended:
            return
        core = cores[ended[0]]  # type: ignore[index]
        code = _exit_code(core)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        with suppress(PeerLost):
            channel.send("failed", message=f"vLLM's process {core.name} {how}")
        os._exit(1)

    threading.Thread(target=watch, name="core watch", daemon=True).start()


def _exit_code(ended: BaseProcess) -> int:
    """vLLM has a thread that waits for it, too: the system tells one of the two, which notes it for the other."""
    deadline = time.monotonic() + _NOTED_S
    while (code := ended.exitcode) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return code or 0


def _gap(position: dict[int, Any]) -> float:
    """Between the two likeliest tokens: log-probabilities differ as logits do."""
    first, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
    return first - second


if __name__ == "__main__":
    sys.exit(main())
