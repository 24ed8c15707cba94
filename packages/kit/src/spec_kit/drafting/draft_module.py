"""Build a draft's module, and name the draft's plugin if it builds none."""

from __future__ import annotations

from torch import Tensor, nn

from spec_core import Draft, FindKernel, TargetSpec, TargetTensors, no_kernel
from spec_core.plugin_faults import checked_answer


def build_module(
    draft: Draft,
    target: TargetSpec,
    tensors: TargetTensors,
    token_counts: Tensor | None = None,
    kernel: FindKernel = no_kernel,
) -> nn.Module:
    """Return what ``draft`` builds. Raise PluginInvalid if it is no module (D3)."""
    return checked_answer(draft.build(target, tensors, token_counts, kernel), nn.Module, draft, "build")
