"""As ``sglang/srt/entrypoints/engine.py``: the scheduler is a spawned process, answers come back on an event loop."""

import asyncio
import multiprocessing
import os
import signal
import tempfile
import threading
from dataclasses import dataclass

from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.plugins import load_plugins

KNOWN = {
    "model_path", "skip_tokenizer_init", "context_length", "dtype", "tp_size", "chunked_prefill_size",
    "max_prefill_tokens", "log_level", "random_seed", "mem_fraction_static", "disable_radix_cache",
    "disable_cuda_graph", "attention_backend", "enforce_disable_flashinfer_allreduce_fusion",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "stand_in_without_plugins", "stand_in_pause_s",
}  # fmt: skip


@dataclass
class PortArgs:
    tokenizer_ipc_name: str
    instance_id: str = "stand-in"


class TokenizerManager:
    def __init__(self, engine):
        self._engine = engine

    def auto_create_handle_loop(self):
        pass

    async def get_internal_state_communicator(self, request):
        return [await self._engine.ask("state", request)]


class Engine:
    def __init__(self, **kwargs):
        if unknown := sorted(kwargs.keys() - KNOWN):
            raise TypeError(f"ServerArgs.__init__() got an unexpected keyword argument {unknown[0]!r}")
        signal.signal(signal.SIGQUIT, lambda number, frame: os.killpg(0, signal.SIGKILL))
        load_plugins()
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self.port_args = PortArgs(f"ipc://{file.name}")
        print("socket", file.name, flush=True)
        self._conn, theirs = multiprocessing.Pipe()
        self._waiting = {}
        self.tokenizer_manager, *_ = self._launch_subprocesses(kwargs, theirs, self)
        if self._conn.recv() != "ready":
            raise RuntimeError("Initialization failed. Please see the error messages above.")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._read, daemon=True).start()

    @classmethod
    def _launch_subprocesses(cls, server_args, conn, engine):
        process = multiprocessing.get_context("spawn").Process(
            target=run_scheduler_process, args=(server_args, conn)
        )
        process.start()
        conn.close()
        return TokenizerManager(engine), process

    async def ask(self, name, message):
        answer = self.loop.create_future()
        self._waiting[name] = answer
        self._conn.send(message)
        return await answer

    async def async_generate(
        self,
        input_ids=None,
        sampling_params=None,
        rid=None,
        return_logprob=False,
        top_logprobs_num=0,
        stream=False,
    ):
        if stream:
            return self._stream(rid, (rid, [input_ids], [sampling_params], 0))
        top = top_logprobs_num if return_logprob else 0
        if isinstance(rid, str):
            (answer,) = await self.ask(rid, ([rid], [input_ids], [sampling_params], top))
            return answer
        return await self.ask(rid[0], (rid, input_ids, sampling_params, top))

    async def _stream(self, rid, message):
        """One prompt, in parts: each holds all tokens so far."""
        (answer,) = await self.ask(rid, ([rid], *message[1:]))
        for count in range(1, len(answer["output_ids"]) + 1):
            about = answer["meta_info"] | {"completion_tokens": count, "cached_tokens": 0}
            yield {"output_ids": answer["output_ids"][:count], "meta_info": about}
            await asyncio.sleep(0)

    def _read(self):
        while True:
            try:
                rid, answers = self._conn.recv()
            except EOFError:
                return
            self.loop.call_soon_threadsafe(self._waiting.pop(rid).set_result, answers)
