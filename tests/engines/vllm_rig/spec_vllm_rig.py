"""Test rig, loaded by every process of vLLM as a ``vllm.general_plugins`` plugin: writes down what it drafts.

Each line of the file named by SPEC_TEST_DRAFTS is one call of the drafter: {request: guesses}. Besides, two defects of
vLLM on a processor are put right, so that the tests see what it does elsewhere. The product leaves vLLM as it is.

- DFlash: ``ops.rms_norm`` takes the first layer's weights for the context keys of every layer. (Acceptance suffers of
  that, output does not.)
- Sampling with a draft: temperatures are not spread over the guesses. (The product refuses it: ``soundness.py``.)
"""

from __future__ import annotations

import json
import os


def install() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, "_spec_rig", False):
        return
    GPUModelRunner._spec_rig = True
    propose = GPUModelRunner.propose_draft_token_ids

    def noting(self, *args, **kwargs):
        drafted = propose(self, *args, **kwargs)
        guesses = drafted.tolist() if hasattr(drafted, "tolist") else drafted
        with open(os.environ["SPEC_TEST_DRAFTS"], "a") as notes:
            notes.write(json.dumps(dict(zip(self.input_batch.req_ids, guesses, strict=False))) + "\n")
        return drafted

    GPUModelRunner.propose_draft_token_ids = noting
    if current_platform.is_cpu():
        _normalise_each_layer_by_its_own_weights()
        _spread_temperatures()


def _normalise_each_layer_by_its_own_weights() -> None:
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalise(self, all_k):
        scaled = all_k.float() * torch.rsqrt(all_k.float().pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return scaled.to(all_k.dtype) * self._k_norm_weights[:, None, None, :]

    DFlashQwen3Model._normalize_context_k = normalise


def _spread_temperatures() -> None:
    import torch
    from vllm.v1.sample import rejection_sampler

    def spread(values, ends, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        spread = values.repeat_interleave(counts, output_size=num_tokens)
        return (
            torch.where(spread == replace_from, replace_to, spread) if replace_from != replace_to else spread
        )

    rejection_sampler.expand_batch_to_tokens = spread
