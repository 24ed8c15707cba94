"""Set the initial weights of a fresh Eagle3 or P-EAGLE draft (docs/decisions/014-initial-weights.md)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from spec_kit.drafting.draft_vocabulary import mapping, select_tokens
from spec_kit.layers.decoder_parts import INIT_STD

if TYPE_CHECKING:
    from torch import Tensor, nn

    from spec_core import TargetSpec, TargetTensors

MATRIX_GAIN = 0.5
"""Initial gain of matrices: weights are normal with standard deviation gain / √inputs, so that the size of the
output does not depend on the width."""
FUSION_GAIN = 0.1
"""Initial gain of ``fc``, the layer that combines the captured states. Its output enters the residual stream,
where later layers cannot remove its random component, so it starts small."""


@torch.no_grad()
def start_from_target(
    module: nn.Module, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
) -> None:
    """Scale the random matrices, copy the target's head and final norm, and choose the draft's vocabulary.

    The module must have ``fc``, ``norm`` and ``lm_head``; the rows of ``lm_head`` are the draft's vocabulary.
    """
    head_VH = module.get_parameter("lm_head.weight")
    for name, weight in module.named_parameters():
        if weight.ndim == 2 and weight is not head_VH:
            gain = FUSION_GAIN if name == "fc.weight" else MATRIX_GAIN
            weight.mul_(gain / math.sqrt(weight.shape[1]) / INIT_STD)
    size, total = len(head_VH), target.vocab_size
    ids_V = select_tokens(token_counts, total, size, target.eos_token_ids)
    head_VH.copy_(tensors.head_VH[ids_V].float() * target.logit_scale)
    module.get_parameter("norm.weight").copy_(tensors.norm_H)
    if size < total:
        module.load_state_dict(mapping(ids_V, total), strict=False)
