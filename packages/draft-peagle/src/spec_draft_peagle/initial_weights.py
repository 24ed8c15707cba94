"""The initial weights of a fresh P-EAGLE draft: Eagle3's (docs/decisions/014-initial-weights.md)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from spec_kit.drafting import INIT_STD, mapping, select_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core import TargetSpec, TargetTensors
    from spec_draft_peagle.model import PEagleModel

MATRIX_GAIN = 0.5
"""A matrix starts as normal draws of standard deviation gain / √inputs: at any width its output is then as large."""
FUSION_GAIN = 0.1
"""Gain of ``fc``, whose output is the residual stream that the layers must outvote."""


@torch.no_grad()
def start_from_target(
    module: PEagleModel, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
) -> None:
    """Scale the matrices as the module drew them, take head and final norm from the target, choose the vocabulary."""
    shape = module.shape
    for name, weight in module.named_parameters():
        if weight.ndim == 2 and name != "lm_head.weight":
            gain = FUSION_GAIN if name == "fc.weight" else MATRIX_GAIN
            weight.mul_(gain / math.sqrt(weight.shape[1]) / INIT_STD)
    ids_V = select_tokens(token_counts, shape.target_vocab_size, shape.vocab_size, target.eos_token_ids)
    module.lm_head.weight.copy_(tensors.head_VH[ids_V].float() * target.logit_scale)
    module.norm.weight.copy_(tensors.norm_H)
    if shape.reduced:
        module.load_state_dict(mapping(ids_V, shape.target_vocab_size), strict=False)
