"""As SGLang's scheduler process: batches of at most ``chunked_prefill_size`` tokens, the last prompt cut to fit."""

import ctypes
import os
import signal
import time
import traceback
from types import SimpleNamespace

from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
from sglang.srt.managers.schedule_batch import Req


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


class ServerArgs(dict):
    def __getattr__(self, name):
        return self.get(name, {"dp_size": 1, "pp_size": 1}.get(name))


class Scheduler:
    def __init__(self, server_args):
        import torch.distributed as dist

        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.tp_cpu_group = dist.group.WORLD
        self.server_args = ServerArgs(server_args)
        self.tp_worker = SimpleNamespace(model_runner=ModelRunner(server_args["model_path"]))
        self.weight_updater = SchedulerWeightUpdaterManager(self)
        self.draft_worker = None
        if folder := server_args.get("speculative_draft_model_path"):
            from sglang.srt.model import Draft

            self.spec_algorithm = SimpleNamespace(is_eagle3=lambda: True)
            runner = SimpleNamespace(model=Draft(folder), model_config=SimpleNamespace(quantization=None))
            self.draft_worker = SimpleNamespace(draft_worker=SimpleNamespace(model_runner=runner))

    def get_internal_state(self, request):
        return GetInternalStateReqOutput(internal_state={"effective_max_running_requests_per_dp": 4})

    def run(self, names, prompts, samplings, top):
        time.sleep(self.server_args.get("stand_in_pause_s", 0))
        if any(len(prompt) >= self.server_args["context_length"] - 6 for prompt in prompts):
            about = {"finish_reason": {"type": "abort", "message": "Input length exceeds the maximum"}}
            return [{"output_ids": [], "meta_info": about} for _ in prompts]
        self._prefill(list(zip(names, prompts, strict=True)))
        return [self._answer(*asked, top) for asked in zip(names, prompts, samplings, strict=True)]

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

    def _answer(self, name, prompt, sampling, top):
        count = max(sampling["max_new_tokens"], 1)
        tokens = [(prompt[-1] + i + 1) % 97 for i in range(count)]
        about = {"finish_reason": {"type": "length", "length": count}}
        if top:
            about["output_top_logprobs"] = [[(-0.25, 1, None), (-2.0, 2, None)]] * count
        if draft_tokens := self.server_args.get("speculative_num_draft_tokens"):
            request = Req(name, tokens[:1])
            about |= {key: values[0:1] for key, values in (request.customized_info or {}).items()}
            for correct in (0, 0, draft_tokens - 1):
                request.update_spec_correct_drafts_histogram(correct)
                sent = len(request.output_ids)
                request.output_ids = tokens[: sent + correct + 1]
                for key, values in (request.customized_info or {}).items():
                    about[key] += values[sent : len(request.output_ids)]
            about["spec_correct_drafts_histogram"] = request.spec_correct_drafts_histogram
        return {"output_ids": tokens, "meta_info": about}


def run_scheduler_process(server_args, conn):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if not server_args.get("stand_in_without_plugins"):
        from sglang.srt.plugins import load_plugins

        load_plugins()
    try:
        scheduler = Scheduler(server_args)
        conn.send("ready")
        while True:
            message = conn.recv()
            if isinstance(message, GetInternalStateReq):
                conn.send(("state", scheduler.get_internal_state(message)))
            else:
                conn.send((message[0][0], scheduler.run(*message)))
    except EOFError:
        return
    except Exception:  # noqa: BLE001 (top of a process)
        traceback.print_exc()
        os.kill(os.getppid(), signal.SIGQUIT)
