"""The target's head over the blocks' slots, the loss and its gradients, some blocks at a time.

Only slots that count are multiplied by the head. Loss, metrics and the gradient with respect to the states come out
of the same pass, so logits live for one chunk.

Shapes: A blocks, S = B − 1 slots that guess, R counted slots, C blocks of a chunk, V rows of the head (of this
shard: see ``spec_core.ops``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from spec_core import to_device_async
from spec_core.records import StepOutput
from spec_draft_dflash.targets import HardTargets, SoftTargets
from spec_kit.drafting import sharded_logsumexp_argmax, with_gradients

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core import VocabularyOps
    from spec_core.records import DraftBatch
    from spec_draft_dflash.blocks import Blocks
    from spec_draft_dflash.config import LossKind
    from spec_draft_dflash.kernels import DFlashKernels


@dataclass(frozen=True)
class CountedSlots:
    """The slots that count, block by block: slots 1 to ``counted`` of each."""

    counted_A: Tensor
    """int64 [A], on the CPU: chunks are cut without waiting for the device."""
    block_R: Tensor
    slot_R: Tensor
    """int64 [R], on the device; slot k is k − 1 here."""
    anchor_R: Tensor
    """int64 [R], on the device: index of the anchor in the flat batch."""

    @classmethod
    def of(cls, blocks: Blocks, device: torch.device) -> CountedSlots:
        """Return the counted slots of some blocks, on the device."""
        counted_A = blocks.counted_A
        block_R = torch.arange(len(counted_A)).repeat_interleave(counted_A)
        slot_R = torch.arange(len(block_R)) - (counted_A.cumsum(0) - counted_A)[block_R]
        block_R, slot_R, anchor_R = to_device_async(
            torch.stack([block_R, slot_R, blocks.anchor_A[block_R]]), device
        )
        return cls(counted_A, block_R, slot_R, anchor_R)

    def chunks(self, num_rows: int, block_slots: int) -> list[tuple[slice, slice]]:
        """Return (blocks, rows) of each chunk.

        A chunk is whole blocks, of at most ``num_rows`` slots where one block has no more.
        """
        size = max(1, num_rows // block_slots)
        ends = [0, *self.counted_A.cumsum(0).tolist()]
        edges = [*range(0, len(self.counted_A), size), len(self.counted_A)]
        return [(slice(a, b), slice(ends[a], ends[b])) for a, b in pairwise(edges) if a < b]


@dataclass(frozen=True, kw_only=True)
class BlockLoss:
    """The targets of slots, and the weight of each."""

    ops: VocabularyOps
    kernels: DFlashKernels
    kind: LossKind
    weight_S: Tensor
    """Weights of slots, for the losses that do not weigh by themselves."""
    alpha: float
    """The parameter of ``dpace``."""

    def __call__(
        self, states_ASH: Tensor, batch: DraftBatch, slots: CountedSlots, denominators: Tensor
    ) -> StepOutput:
        """Return loss and metrics of the blocks' states [A, S, H], as shares over the global denominators."""
        totals = _BlockSums(self, states_ASH, batch, denominators)
        teacher_size = 4 if self.kind == "soft" else 0
        row_bytes = self.ops.shard_rows * (self.ops.head_VH.element_size() + teacher_size)
        num_rows = self.ops.chunk_bytes // row_bytes
        with torch.no_grad():
            for blocks, rows in slots.chunks(num_rows, len(self.weight_S)):
                totals.add(slots, blocks, rows)
        return totals.output()

    def targets(self, batch: DraftBatch, label_R: Tensor) -> HardTargets | SoftTargets:
        """Return what some slots are to guess. ``label_R``: index of the guessed token in the batch.

        A soft target is what the target's state one token earlier says.
        """
        if self.kind == "soft":
            logits_RV = self.ops.teacher_logits(batch.hidden_TNH[label_R - 1, -1])
            return SoftTargets.of(logits_RV, self.ops, self.kernels)
        return HardTargets.of(batch.input_ids_T[label_R], self.ops, self.kernels)

    def weights(self, cross_CS: Tensor, counted_CS: Tensor) -> Tensor:
        """Return the weights [C, S] of the slots of some blocks, given their cross-entropies.

        A slot that does not count weighs 0.
        """
        if self.kind != "dpace":
            return counted_CS * self.weight_S.to(cross_CS)
        # D-PACE: P_k is the (smoothed) chance that slots 1 to k are accepted; slot k weighs what it can still add.
        accepted_CS = torch.where(counted_CS, (1 - self.alpha) * (-cross_CS).exp() + self.alpha, 1.0)
        reached_CS = accepted_CS.cumprod(1) * counted_CS
        return reached_CS.flip(1).cumsum(1).flip(1) * counted_CS


class _BlockSums:
    """Sums of one forward pass over all chunks: loss, metrics, and the states' gradient where it is wanted."""

    def __init__(self, loss: BlockLoss, states_ASH: Tensor, batch: DraftBatch, denominators: Tensor) -> None:
        self.rule, self.states_ASH, self.batch = loss, states_ASH, batch
        total = denominators[0].to(states_ASH.device)
        wide = torch.promote_types(states_ASH.dtype, torch.float32)
        self.scale = torch.where(total > 0, 1 / total.clamp(min=1e-300), 0).to(wide)
        zeros, num_slots = self.scale.new_zeros, states_ASH.shape[1]
        self.loss, self.lengths = zeros(()), zeros(())
        self.sums = {"accuracy": zeros(num_slots), "slot_loss": zeros(num_slots)}
        self.counted_S = torch.zeros(num_slots, dtype=torch.int64, device=states_ASH.device)
        self.grad_ASH = torch.zeros_like(states_ASH) if torch.is_grad_enabled() else None

    def add(self, slots: CountedSlots, blocks: slice, rows: slice) -> None:
        """Scores the counted slots ``rows`` of the blocks ``blocks``."""
        block_R, slot_R, anchor_R = (x[rows] for x in (slots.block_R, slots.slot_R, slots.anchor_R))
        place, ops = (block_R - blocks.start, slot_R), self.rule.ops
        label_R = anchor_R + 1 + slot_R
        states_RH = self.states_ASH[block_R, slot_R]
        logits_RV = F.linear(states_RH, ops.head_VH)
        ids_V = torch.arange(*ops.vocab_range, device=logits_RV.device)
        log_sum_R, best_R = sharded_logsumexp_argmax(logits_RV, ids_V, ops, self.rule.kernels)
        correct_R = best_R == self.batch.input_ids_T[label_R]
        targets = self.rule.targets(self.batch, label_R)
        cross_R = log_sum_R - ops.reduce_sum(targets.aligned(logits_RV, log_sum_R))
        table = cross_R.new_zeros(blocks.stop - blocks.start, self.states_ASH.shape[1])
        counted_CS = table.bool().index_put(place, torch.ones_like(correct_R))
        correct_CS = table.bool().index_put(place, correct_R)
        cross_CS = table.index_put(place, cross_R)
        weight_CS = self.rule.weights(cross_CS, counted_CS) * self.scale
        self.loss += (weight_CS * cross_CS).sum()
        self.lengths += counted_CS.any(1).sum() + correct_CS.cumprod(1).sum()
        self.sums["accuracy"] += correct_CS.sum(0)
        self.sums["slot_loss"] += cross_CS.sum(0)
        self.counted_S += counted_CS.sum(0)
        if self.grad_ASH is not None:
            grad_RH = targets.gradient_(logits_RV, log_sum_R, weight_CS[place]) @ ops.head_VH
            self.grad_ASH[block_R, slot_R] = ops.reduce_sum(grad_RH)

    def output(self) -> StepOutput:
        """Return the sums. Every block counts its first slot, so there are as many of these as blocks."""
        loss = self.loss
        if self.grad_ASH is not None:
            loss = with_gradients(loss, (self.grad_ASH,), (self.states_ASH,))
        counts = dict.fromkeys(self.sums, self.counted_S)
        return StepOutput(
            loss=loss,
            sums={**self.sums, "acceptance_length": self.lengths},
            counts={**counts, "acceptance_length": self.counted_S[0]},
        )
