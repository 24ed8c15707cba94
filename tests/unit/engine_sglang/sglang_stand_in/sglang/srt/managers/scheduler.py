"""As SGLang's scheduler process: batches of at most ``chunked_prefill_size`` tokens, the last prompt cut to fit."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from types import SimpleNamespace


class ForwardMode:
    def is_extend(self):
        return True


class ModelRunner:
    def __init__(self, folder):
        from sglang.srt.model import Model

        self.model = Model(folder)

    def forward(self, forward_batch, pp_proxy_tensors=None):
        import torch

        with torch.inference_mode():
            pairs = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
            positions = torch.cat([torch.arange(first, first + length) for first, length in pairs])
            return self.model(forward_batch.input_ids, positions, forward_batch)


class Scheduler:
    def __init__(self, server_args):
        self.server_args = server_args
        self.tp_worker = SimpleNamespace(model_runner=ModelRunner(server_args["model_path"]))

    def run(self, names, prompts, samplings, top):
        if any(len(prompt) >= self.server_args["context_length"] - 6 for prompt in prompts):
            about = {"finish_reason": {"type": "abort", "message": "Input length exceeds the maximum"}}
            return [{"output_ids": [], "meta_info": about} for _ in prompts]
        self._prefill(list(zip(names, prompts, strict=True)))
        return [self._answer(*pair, top) for pair in zip(prompts, samplings, strict=True)]

    def _prefill(self, waiting):
        import torch

        done = dict.fromkeys((name for name, _ in waiting), 0)
        while waiting:
            room, parts = self.server_args["chunked_prefill_size"], []
            for name, prompt in waiting:
                length = min(room, len(prompt) - done[name])
                if length:
                    parts.append((name, prompt, done[name], length))
                    room -= length
            self.tp_worker.model_runner.forward(
                SimpleNamespace(
                    forward_mode=ForwardMode(),
                    rids=[name for name, *_ in parts],
                    input_ids=torch.tensor([t for _, p, first, n in parts for t in p[first : first + n]]),
                    extend_prefix_lens_cpu=[first for *_, first, _ in parts],
                    extend_seq_lens_cpu=[length for *_, length in parts],
                )
            )
            for name, _, first, length in parts:
                done[name] = first + length
            waiting = [(name, prompt) for name, prompt in waiting if done[name] < len(prompt)]

    def _answer(self, prompt, sampling, top):
        count = max(sampling["max_new_tokens"], 1)
        about = {"finish_reason": {"type": "length", "length": count}}
        if top:
            about["output_top_logprobs"] = [[(-0.25, 1, None), (-2.0, 2, None)]] * count
        if draft_tokens := self.server_args.get("speculative_num_draft_tokens"):
            about["spec_correct_drafts_histogram"] = [2] + [0] * (draft_tokens - 2) + [1]
        return {"output_ids": [(prompt[-1] + i + 1) % 97 for i in range(count)], "meta_info": about}


def run_scheduler_process(server_args, conn):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if not server_args.get("stand_in_without_plugins"):
        from sglang.srt.plugins import load_plugins

        load_plugins()
    try:
        scheduler = Scheduler(server_args)
        conn.send("ready")
        while True:
            names, prompts, samplings, top = conn.recv()
            conn.send((names[0], scheduler.run(names, prompts, samplings, top)))
    except EOFError:
        return
    except Exception:  # noqa: BLE001 (top of a process)
        traceback.print_exc()
        os.kill(os.getppid(), signal.SIGQUIT)
