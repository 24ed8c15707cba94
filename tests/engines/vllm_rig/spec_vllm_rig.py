"""Test rig, loaded by every process of vLLM as a ``vllm.general_plugins`` plugin: writes down what it drafts.

Each line of the file named by SPEC_TEST_DRAFTS is one call of the drafter: {request: guesses}. Besides, where vLLM
runs on a processor, DFlash's normalisation of context keys is put right: there ``ops.rms_norm`` takes the first
layer's weights for every layer. (The product leaves that as it is: acceptance suffers, output does not.)
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


def _normalise_each_layer_by_its_own_weights() -> None:
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalise(self, all_k):
        scaled = all_k.float() * torch.rsqrt(all_k.float().pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return scaled.to(all_k.dtype) * self._k_norm_weights[:, None, None, :]

    DFlashQwen3Model._normalize_context_k = normalise
