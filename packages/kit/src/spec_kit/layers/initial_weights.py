"""Set the initial weights of fresh drafts (docs/decisions/014-initial-weights.md)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spec_core import TargetSpec, TargetTensors
from spec_kit.drafting.vocabulary_module import VocabularyModule
from spec_kit.layers.decoder_parts import INIT_STD

MATRIX_GAIN = 0.5
"""Initial gain of matrices: weights are normal with standard deviation gain / √inputs, so that the size of the
output does not depend on the width."""
FUSION_GAIN = 0.1
"""Initial gain of ``fc``, the layer that combines the captured states. Its output enters the residual stream,
where later layers cannot remove its random component, so it starts small."""
LOGIT_STD = 0.5
"""Initial standard deviation over the vocabulary of a guess's logits. Logits of a fresh draft are random: with
deviation σ, a guess costs about σ²/2 nats more than equal probabilities."""
LEAST_OWN_LOGIT = 12.0
"""Least initial logit, σ · √H, of a state that points at a token's row of the head. Below it a narrow draft (small
width H) could not be sure of a token."""
_MOST_ROWS = 4096
"""Number of a head's rows from which ``first_norm`` estimates the deviation."""


@torch.no_grad()
def start_from_target(
    module: VocabularyModule, target: TargetSpec, tensors: TargetTensors, token_counts: Tensor | None
) -> None:
    """Scale the random matrices, copy the target's head and scaled norm, and choose the draft's vocabulary.

    The module must have ``fc``, ``norm`` and ``lm_head``; the rows of ``lm_head`` are the draft's vocabulary.
    """
    head_VH = module.get_parameter("lm_head.weight")
    for name, weight in module.named_parameters():
        if weight.ndim == 2 and weight is not head_VH:
            gain = FUSION_GAIN if name == "fc.weight" else MATRIX_GAIN
            weight.mul_(gain / math.sqrt(weight.shape[1]) / INIT_STD)
    ids_V = module.choose_vocabulary(target, token_counts)
    head_VH.copy_(tensors.head_VH[ids_V].float() * target.logit_scale)
    module.get_parameter("norm.weight").copy_(first_norm(tensors.norm_H, head_VH))


def first_norm(norm_H: Tensor, head_VH: Tensor) -> Tensor:
    """Return the first weight of a draft's final norm: the target's, scaled down so that guesses are unsure.

    With the result and the head ``head_VH``, the logits of a random state have the standard deviation LOGIT_STD (in
    narrow drafts LEAST_OWN_LOGIT / √H), or less if the target's weight gives less. In float32.
    """
    wide_H = norm_H.float()
    rows_RH = head_VH[:: -(-len(head_VH) // _MOST_ROWS)].float()
    deviation = (rows_RH.std(0) * wide_H).norm()
    wanted = max(LOGIT_STD, LEAST_OWN_LOGIT / math.sqrt(len(norm_H)))
    return wide_H * (wanted / deviation).clamp(max=1)
