"""The heads, their loss, and what they propose.

Shapes: T tokens of a batch, K heads, H width, V vocabulary, R rows that count for one head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_core import Proposal, Proposer, to_device_async
from spec_core.records import StepOutput
from spec_kit.layers import linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator

    from spec_core import VocabularyOps
    from spec_core.records import DraftBatch
    from spec_draft_medusa.draft import MedusaShape
    from spec_draft_medusa.kernels import MedusaKernels


class Block(nn.Module):
    """One residual layer. Names of parameters are those of vLLM's model."""

    def __init__(self, hidden_size: int, kernels: MedusaKernels) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear(hidden_size, hidden_size)])
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.medusa_residual(x, self.layers[0](x))


class MedusaModel(nn.Module):
    """K heads, of which head k guesses token t + 2 + k from the target's state at token t."""

    final_norm: Tensor

    def __init__(self, shape: MedusaShape, norm_H: Tensor, norm_eps: float, kernels: MedusaKernels) -> None:
        super().__init__()
        heads, width = range(shape.num_heads), shape.hidden_size
        self.blocks = nn.ModuleList(Block(width, kernels) for _ in heads)
        self.lm_heads = nn.ModuleList(linear(width, shape.target_vocab_size) for _ in heads)
        # The target's: neither trained nor exported.
        self.register_buffer("final_norm", norm_H.float(), persistent=False)
        self.norm_eps = norm_eps

    def states(self, hidden_TNH: Tensor) -> Tensor:
        """Return what vLLM gives to the heads: [T, H] behind the target's final norm."""
        dtype = self.lm_heads[0].weight.dtype
        hidden_TH = hidden_TNH[:, -1].float()
        normed = F.rms_norm(hidden_TH, self.final_norm.shape, self.final_norm.float(), self.norm_eps)
        return normed.to(dtype)

    def logits(self, head: int, states_RH: Tensor) -> Tensor:
        return self.lm_heads[head](self.blocks[head](states_RH))

    def forward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps) -> StepOutput:
        """Return this batch's share of the mean cross-entropy over heads; ``denominators``: the global batch's."""
        states_TH, device = self.states(batch.hidden_TNH), batch.input_ids_T.device
        scale_K = (1 / denominators.clamp(min=1)).to(device, torch.float32) / len(self.blocks)
        correct_TK = torch.zeros(len(states_TH), len(self.blocks), dtype=torch.bool, device=device)
        loss, losses, counts = states_TH.new_zeros((), dtype=torch.float32), [], []
        for head in range(len(self.blocks)):
            row_R = to_device_async(rows_of(batch, head), device)
            label_R, logits_RV = batch.input_ids_T[row_R + 2 + head], self.logits(head, states_TH[row_R])
            cross = F.cross_entropy(logits_RV.float(), label_R, reduction="sum")
            loss = loss + cross * scale_K[head]
            correct_TK[row_R, head] = logits_RV.argmax(-1) == label_R
            losses.append(cross.detach())
            counts.append(len(row_R))
        accepted = correct_TK.cumprod(1).sum()
        count_K = torch.tensor(counts, device=device)
        return StepOutput(
            loss=loss,
            sums={
                "accuracy": correct_TK.sum(0),
                "head_loss": torch.stack(losses),
                "acceptance_length": count_K[0] + accepted,
            },
            counts={"accuracy": count_K, "head_loss": count_K, "acceptance_length": count_K[0]},
        )


def rows_of(batch: DraftBatch, head: int) -> Tensor:
    """Return int64 [R], on the CPU: rows t whose token t + 2 + head is supervised and of the same document."""
    mask_T, ahead = batch.loss_mask_T, 2 + head
    rows = [torch.zeros(0, dtype=torch.int64)]
    for span in batch.spans:
        rows.append(span.start + mask_T[span.start + ahead : span.stop].nonzero().squeeze(1))
    return torch.cat(rows)


class HeadsProposer(Proposer):
    """Guesses with all heads at once, as vLLM does: the most likely token of each, at any temperature."""

    def __init__(self, module: MedusaModel) -> None:
        self._module = module
        self._last = module.final_norm.new_zeros(1, len(module.final_norm))

    @torch.no_grad()
    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        self._last = self._module.states(hidden_TNH[-1:].to(self._module.final_norm.device))

    @torch.no_grad()
    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        guesses = [int(self._module.logits(head, self._last).argmax()) for head in range(num_tokens)]
        return Proposal(token_ids=tuple(guesses))
