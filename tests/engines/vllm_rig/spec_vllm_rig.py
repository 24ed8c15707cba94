"""Test rig, loaded by every process of vLLM as a ``vllm.general_plugins`` plugin: writes down what it drafts.

Each line of the file named by SPEC_TEST_DRAFTS is one call of the drafter: {request: guesses}. Besides, where vLLM
runs on a processor, DFlash's normalisation of context keys is put right: there ``ops.rms_norm`` takes the first
layer's weights for every layer. (The product leaves that as it is: acceptance suffers, output does not.)

If ``PATH.positions`` is beside that file, drafts get positions as from vLLM's second runner.

Beside that file the frontend opens streams about its requests (``spec_rig_streams``).

Each line of the file named by SPEC_TEST_SWAPS is one exchange of a draft's weights: digests of the target before and
after it. Beside it, ``PATH.fault`` plants faults: "[3, true]" makes the third copy or assignment raise once it is
done, "[3, false]" before it is; all that follow raise, too, if the file says "[3, true, true]".

Each line of the file named by SPEC_TEST_SCHEDULED is the number of tokens that vLLM runs in one step.

The folder named by SPEC_TEST_SAMPLER gets the logits and tokens of all sampled steps (``spec_vllm_sampler``).

With SPEC_TEST_FORKS set, vLLM forks its processes on a processor, as it does on a GPU: each that is spawned imports
vLLM anew. So does the one in which vLLM looks at the class of each model that it sees for the first time.
"""

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path


@functools.cache
def install() -> None:
    if importlib.util.find_spec("torchvision") is None:
        _do_without_torchvision()
    from vllm.platforms import current_platform

    for watch in (_watch_the_first_runner, _watch_the_second_runner):
        with contextlib.suppress(ImportError):
            watch()
    _stream_to_clients(Path(os.environ["SPEC_TEST_DRAFTS"]).parent)
    if "SPEC_TEST_SWAPS" in os.environ:
        _watch_exchanges(Path(os.environ["SPEC_TEST_SWAPS"]))
    if "SPEC_TEST_SCHEDULED" in os.environ:
        _note_tokens_of_steps(Path(os.environ["SPEC_TEST_SCHEDULED"]))
    if "SPEC_TEST_SAMPLER" in os.environ:
        import spec_vllm_sampler

        spec_vllm_sampler.record()
    if current_platform.is_cpu():
        _normalise_each_layer_by_its_own_weights()
        if "SPEC_TEST_FORKS" in os.environ:
            _fork_on_a_processor()
            _look_at_models_here()


def _note_tokens_of_steps(file: Path) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler.schedule

    def noting(self, *args, **kwargs):
        planned = schedule(self, *args, **kwargs)
        with file.open("a") as notes:
            notes.write(f"{planned.total_num_scheduled_tokens}\n")
        return planned

    Scheduler.schedule = noting


def _do_without_torchvision() -> None:
    """Let vLLM's files of Qwen's and Gemma's models use the image processor that computes with Pillow.

    They import a module of Transformers that needs torchvision, and so does their processor's part for videos, which
    no test has.
    """
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from transformers.models.gemma4 import image_processing_pil_gemma4
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.processing_utils import ProcessorMixin

    sys.modules["transformers.models.qwen2_vl.image_processing_qwen2_vl"] = image_processing_pil_qwen2_vl
    sys.modules["transformers.models.gemma4.image_processing_gemma4"] = image_processing_pil_gemma4
    AutoVideoProcessor.from_pretrained = lambda *_, **__: Qwen3VLVideoProcessor()
    ProcessorMixin.check_argument_for_proper_class = lambda *_: None


@contextlib.contextmanager
def _token_positions(runner):
    """Give the draft token indices as positions, if ``PATH.positions`` is beside the notes.

    Where a target's positions have three coordinates, vLLM's first runner gives the draft one of them. The second
    one, which a processor does not have, gives it token indices.
    """
    if not runner.uses_mrope or not Path(os.environ["SPEC_TEST_DRAFTS"]).with_suffix(".positions").exists():
        yield
        return
    drafter = runner.drafter
    runner.uses_mrope = False
    drafter._set_positions = lambda count, positions: drafter.positions[:count].copy_(positions)
    try:
        yield
    finally:
        runner.uses_mrope = True
        del drafter._set_positions


def _fork_on_a_processor() -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def forking(vllm_config) -> None:
        check(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(forking)


def _look_at_models_here() -> None:
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def _watch_the_first_runner() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    propose = GPUModelRunner.propose_draft_token_ids

    def noting(self, *args, **kwargs):
        with _token_positions(self):
            drafted = propose(self, *args, **kwargs)
        _note(self.input_batch.req_ids, drafted.tolist() if hasattr(drafted, "tolist") else drafted)
        return drafted

    GPUModelRunner.propose_draft_token_ids = noting


def _watch_the_second_runner() -> None:
    """vLLM runs most models on a GPU by another runner, which tells its guesses to a handler."""
    from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

    tell = DraftTokensHandler.set_draft_tokens

    def noting(self, input_batch, draft_tokens):
        _note(input_batch.req_ids, draft_tokens.tolist())
        tell(self, input_batch, draft_tokens)

    DraftTokensHandler.set_draft_tokens = noting


def _note(requests, guesses) -> None:
    with open(os.environ["SPEC_TEST_DRAFTS"], "a") as notes:
        notes.write(json.dumps(dict(zip(requests, guesses, strict=False))) + "\n")


def _stream_to_clients(folder: Path) -> None:
    from spec_rig_streams import Streams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    generate, streams = AsyncLLM.generate, Streams(folder)

    async def streamed(self, prompt, sampling_params, request_id, **kwargs):
        streams.open()
        tells = sampling_params.output_kind is RequestOutputKind.DELTA
        if tells:
            streams.tell(request_id, 0)
        async for output in generate(self, prompt, sampling_params, request_id, **kwargs):
            if tells:
                streams.tell(request_id, len(output.outputs[0].token_ids))
            yield output

    AsyncLLM.generate = streamed


def _normalise_each_layer_by_its_own_weights() -> None:
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalise(self, all_k):
        scaled = all_k.float() * torch.rsqrt(all_k.float().pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return scaled.to(all_k.dtype) * self._k_norm_weights[:, None, None, :]

    DFlashQwen3Model._normalize_context_k = normalise


def _watch_exchanges(notes: Path) -> None:
    from spec_engine_vllm import packed_weights
    from spec_kit.weight_sync import ExchangedSlot, tensor_exchange

    swap = ExchangedSlot.swap
    plain = [
        (tensor_exchange, "_copy", tensor_exchange._copy),
        (packed_weights, "_assign", packed_weights._assign),
    ]

    def watched(self) -> None:
        before = _digest(self._target)
        with contextlib.suppress(FileNotFoundError):  # one rank gets it
            fault = notes.with_suffix(".fault").rename(notes.with_suffix(f".{os.getpid()}"))
            _plant(plain, *json.loads(fault.read_text()))
        try:
            swap(self)
        finally:
            for module, name, function in plain:
                setattr(module, name, function)
            with notes.open("a") as lines:
                lines.write(json.dumps([before, _digest(self._target)]) + "\n")

    ExchangedSlot.swap = watched


def _plant(plain, at: int, is_after: bool, stays: bool = False) -> None:
    calls = itertools.count(1)

    def faulty(function):
        @functools.wraps(function)
        def call(*args) -> None:
            number = next(calls)
            hit = number == at or (stays and number > at)
            if is_after or not hit:
                function(*args)
            if hit:
                raise MemoryError(f"planted at {number}")

        return call

    for module, name, function in plain:
        setattr(module, name, faulty(function))


def _digest(model) -> str:
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
