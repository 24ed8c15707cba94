"""Record what vLLM's sampler gets and gives, in both runners: a part of the rig, for ``sampled_answers.py``.

The folder named by SPEC_TEST_SAMPLER gets files ``N.pt``, each with the steps of about two seconds. A step has
``requests``, ``starts`` (the first row of each request), ``raw`` (the model's logits), ``processed`` (the logits
behind the temperature; second runner), ``tokens`` and ``counts``. Steps of greedy requests alone are left out.
"""

import contextlib
import os
import threading
import time
from itertools import accumulate, count
from pathlib import Path

import torch

EVERY_S = 2.0


class Recorder:
    """Keeps the steps on the GPU and writes them from a thread of its own, so that vLLM's steps do not wait."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._steps, self._lock = folder, [], threading.Lock()
        self._numbers, self._thread = count(), None

    def add(self, step: dict) -> None:
        with self._lock:
            self._steps.append(step)
            if self._thread is None:  # not before: a process that forks later has its own
                self._thread = threading.Thread(target=self._write, daemon=True)
                self._thread.start()

    def _write(self) -> None:
        while True:
            time.sleep(EVERY_S)
            with self._lock:
                steps, self._steps = self._steps, []
            if not steps:
                continue
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            part = self._folder / "steps.part"
            torch.save([{name: on_the_host(value) for name, value in step.items()} for step in steps], part)
            part.rename(self._folder / f"{next(self._numbers)}.pt")


def on_the_host(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


def record() -> None:
    """Watch the samplers of both runners."""
    recorder = Recorder(Path(os.environ["SPEC_TEST_SAMPLER"]))
    for watch in (_watch_the_first_runner, _watch_the_second_runner):
        with contextlib.suppress(ImportError):
            watch(recorder)


def _watch_the_first_runner(recorder: Recorder) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample = GPUModelRunner._sample

    def noting(self, logits, spec_decode_metadata):
        batch = self.input_batch
        if logits is None or batch.sampling_metadata.all_greedy:
            return sample(self, logits, spec_decode_metadata)
        requests, raw = list(batch.req_ids[: batch.num_reqs]), logits.clone()
        drafts = spec_decode_metadata.num_draft_tokens if spec_decode_metadata else [0] * len(requests)
        given = sample(self, logits, spec_decode_metadata)
        tokens = given.sampled_token_ids.clone()
        starts = list(accumulate((number + 1 for number in drafts[:-1]), initial=0))
        counts = (tokens >= 0).sum(-1)
        recorder.add({"requests": requests, "starts": starts, "raw": raw, "tokens": tokens, "counts": counts})
        return given

    GPUModelRunner._sample = noting


def _watch_the_second_runner(recorder: Recorder) -> None:
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    process = Sampler.apply_sampling_params
    seen = []

    def processing(self, *args, **kwargs):
        processed = process(self, *args, **kwargs)
        seen[:] = [processed]
        return processed

    def watch(kind, states) -> None:
        sample = kind.__call__

        def noting(self, logits, input_batch, *args, **kwargs):
            if not states(self).temperature.np[input_batch.idx_mapping_np].any():
                return sample(self, logits, input_batch, *args, **kwargs)
            raw = logits.clone()
            given = sample(self, logits, input_batch, *args, **kwargs)
            recorder.add(
                {
                    "requests": list(input_batch.req_ids),
                    "starts": input_batch.cu_num_logits_np[: input_batch.num_reqs].tolist(),
                    "raw": raw,
                    "processed": seen.pop().clone(),
                    "tokens": given.sampled_token_ids.clone(),
                    "counts": given.num_sampled.clone(),
                }
            )
            return given

        kind.__call__ = noting

    Sampler.apply_sampling_params = processing
    watch(Sampler, lambda sampler: sampler.sampling_states)
    watch(RejectionSampler, lambda rejection: rejection.sampler.sampling_states)
