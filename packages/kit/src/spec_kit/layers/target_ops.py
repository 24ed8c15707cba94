"""TargetOps implements VocabularyOps on one device, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_core import TargetSpec, TargetTensors, VocabularyOps


class TargetOps(VocabularyOps):
    """The target's embedding, final norm and head on one device; see spec_core.ops for the contract."""

    def __init__(
        self,
        target: TargetSpec,
        tensors: TargetTensors,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Move the target's tensors to ``device`` in ``dtype``."""
        self._target = target
        self._embedding_VH = tensors.embedding_VH.to(device, dtype)
        self._head_VH = self._embedding_VH if target.tied else tensors.head_VH.to(device, dtype)
        self._norm_H = tensors.norm_H.to(device, dtype)

    @property
    def vocab_range(self) -> tuple[int, int]:
        """Range (first, stop) of the local rows of the vocabulary, which are all rows."""
        return 0, self._target.vocab_size

    @property
    def head_VH(self) -> Tensor:
        """The target's head [V, H] (O4)."""
        return self._head_VH

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embedding of each token id (O1)."""
        return F.embedding(input_ids, self._embedding_VH)

    @torch.no_grad()
    def teacher_logits(self, hidden_RH: Tensor) -> Tensor:
        """Return the target's logits, [R, V], from the inputs of its final norm (O2)."""
        wide = hidden_RH.to(torch.promote_types(self._norm_H.dtype, torch.float32))
        normed = (
            F.rms_norm(wide, wide.shape[-1:], eps=self._target.norm_eps).to(self._norm_H.dtype) * self._norm_H
        )
        logits = self.head.forward(normed)
        scale = self._target.logit_scale
        cap = self._target.logit_softcap
        if scale == 1 and cap is None:
            return logits
        logits = logits.to(wide.dtype) * scale  # rounded once more in bf16, small probabilities would be lost
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def reduce_max(self, value_R: Tensor) -> Tensor:
        """Return ``value_R`` unchanged, because there is one shard (O3)."""
        return value_R

    def reduce_sum(self, value_R: Tensor) -> Tensor:
        """Return ``value_R`` unchanged, because there is one shard (O3)."""
        return value_R
