"""Compute loss, metrics and gradients of blocks and of paths through their candidates, some blocks at a time.

The loss is the head's (see ``candidate_loss``), divided by the sum of the guesses' weights, and the path's, divided
by the number of guesses. The path's loss of a guess is, with the scores z of the steps from the data's token before
the guess to its candidates, and s = softmax(z):

    path_weight · (−log s[label]) + margin_weight · max(0, margin − (z[label] − largest other z))
    + penalty_weight · Σ s · max(0, target's logit of the label − target's logit of the candidate)

It is 0 if the data's token of this guess or of an earlier one of its block is no candidate, because no path leads
there. It moves the head's states, too, by the candidates' log-probabilities. With ``opd``, a guess that the target
refused has KL(s ‖ p) in place of both losses, or 0 if no path leads to it; p is the target's distribution
(``spec_kit.block_drafting.judged_guesses``).

The path head compares the candidates of all slots of a block, even of slots whose guess does not count in the loss.
Loss, metrics and gradients come from one pass, so only one chunk's logits and scores are in memory.

Shapes: A blocks of the batch, B blocks of a chunk, S guesses of a block, R = B · S guesses, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_core import to_device_async
from spec_core.records import DraftBatch, StepOutput
from spec_draft_dflash2.candidate_loss import CandidateLoss, HeadGuesses
from spec_draft_dflash2.lilicorr.config import LiLiCorrConfig
from spec_draft_dflash2.lilicorr.head import PathHead
from spec_kit.block_drafting import Blocks, CountedGuesses, GuessFactors, GuessMetrics, loss_scale
from spec_kit.layers import with_gradients

_VALUES = ("accuracy", "acceptance_t1", "head_accuracy", "recall", "head_loss", "path_loss")
_LENGTHS = {
    "acceptance_length": ("accuracy", "accuracy"),
    "acceptance_length_t1": ("accuracy", "acceptance_t1"),
}


@dataclass(frozen=True)
class PathInputs:
    """The tensors for which the loss computes gradients, besides the path head's weights."""

    states_ASH: Tensor
    """Inputs of the target's head."""
    anchor_AH: Tensor
    """The context at the last token before a block; any values if there is none."""
    has_anchor_A: Tensor
    """Whether there is a token before the block, bool."""


@dataclass(frozen=True, kw_only=True)
class PathLoss(CandidateLoss):
    """Computes the loss of guesses, which has several terms, and weighs each guess."""

    options: LiLiCorrConfig
    path_head: PathHead

    def __call__(
        self, inputs: PathInputs, batch: DraftBatch, blocks: Blocks, denominators: Tensor
    ) -> StepOutput:
        """Return loss and metrics of the blocks, divided by the global batch's ``denominators``."""
        num_guesses = len(self.weight_S)
        device = inputs.states_ASH.device
        counted = CountedGuesses.of(blocks, device)
        metrics = GuessMetrics(counted, num_guesses, _VALUES, _LENGTHS)
        totals = _Sums(self, inputs, batch, denominators, metrics)
        every = _every_guess(blocks, num_guesses, device)
        chunks = (guesses.chunks(self.ops, self.head, num_guesses) for guesses in (every, counted))
        with torch.no_grad():
            for chunk, counted_chunk in zip(*chunks, strict=True):
                totals.add(chunk, counted_chunk)
        return totals.output()


def _every_guess(blocks: Blocks, num_guesses: int, device: torch.device) -> CountedGuesses:
    """Return all guesses of blocks. For those that do not count, the token before them is the anchor."""
    whole = torch.full_like(blocks.counted_A, num_guesses)
    every = CountedGuesses.of(replace(blocks, counted_A=whole), device)
    anchor_R, counted_R = (
        tensor_A.repeat_interleave(num_guesses) for tensor_A in (blocks.anchor_A, blocks.counted_A)
    )
    return replace(every, before_R=every.before_R.where(every.before_R - anchor_R < counted_R, anchor_R))


@dataclass(frozen=True, kw_only=True)
class _Path:
    """The scores of the steps from the data's tokens to the candidates of a chunk's guesses."""

    score_BSC: Tensor
    label_BS1: Tensor
    """int64: place of the data's token among the candidates; any place if it is none of them."""
    reached_BS: Tensor
    """Whether the data's tokens before the guess are candidates, so that a path leads to it."""
    counts_BS: Tensor
    """Whether the guess has a loss: it counts, and a path leads to its label."""

    @classmethod
    def of(cls, scores: tuple[Tensor, Tensor], is_label_BSC: Tensor, counted_BS: Tensor) -> Self:
        """Return the path of the data's tokens; ``scores`` are the path head's."""
        start_BC, step_BSCC = scores
        label_BS1 = is_label_BSC.long().argmax(-1, keepdim=True)
        before_BSCC = label_BS1[:, :-1, :, None].expand(-1, -1, 1, step_BSCC.shape[-1])
        score_BSC = torch.cat([start_BC[:, None], step_BSCC.gather(2, before_BSCC).squeeze(2)], dim=1)
        found_BS = is_label_BSC.any(-1).long().cumprod(1).bool()
        reached_BS = found_BS.roll(1, 1)
        reached_BS[:, 0] = True
        return cls(
            score_BSC=score_BSC,
            label_BS1=label_BS1,
            reached_BS=reached_BS,
            counts_BS=found_BS & counted_BS,
        )

    def loss(self, target_BSC: Tensor, options: LiLiCorrConfig) -> Tensor:
        """Return the path's loss of each guess [B, S]. ``target_BSC``: the target's logits of candidates."""
        log_BSC = self.score_BSC.log_softmax(-1)
        own_BS, cross_BS = (at.gather(-1, self.label_BS1).squeeze(-1) for at in (self.score_BSC, -log_BSC))
        others_BSC = self.score_BSC.scatter(-1, self.label_BS1, torch.finfo(self.score_BSC.dtype).min)
        lacking_BS = F.relu(options.margin - own_BS + others_BSC.amax(-1))
        worse_BSC = F.relu(target_BSC.gather(-1, self.label_BS1) - target_BSC)
        penalty_BS = (log_BSC.exp() * worse_BSC).sum(-1)
        terms_BS = options.path_weight * cross_BS + options.penalty_weight * penalty_BS
        return (terms_BS + options.margin_weight * lacking_BS) * self.counts_BS

    def reverse_kl(self, compared: HeadGuesses) -> Tensor:
        """Return KL(s ‖ p) of each guess [B, S]; 0 if no path leads there.

        The gradient jumps where rounding changes the candidates or which guesses a path leads to: with few refused
        guesses, an fp8 head turns it no further than 2 % noise on the head's weights, or bfloat16 from float32.
        """
        log_prob_RC = compared.target_RC - compared.teacher.distribution[1][:, None]
        log_BSC = self.score_BSC.log_softmax(-1)
        return (log_BSC.exp() * (log_BSC - log_prob_RC.view_as(log_BSC))).sum(-1) * self.reached_BS


class _Sums:
    """Sums of one forward pass over all chunks: loss, metrics, and gradients if they are enabled."""

    def __init__(
        self,
        rule: PathLoss,
        inputs: PathInputs,
        batch: DraftBatch,
        denominators: Tensor,
        metrics: GuessMetrics,
    ) -> None:
        self.rule = rule
        self.inputs = inputs
        self.batch = batch
        self.metrics = metrics
        self.factors = GuessFactors(
            rule.weight_S, denominators, batch, inputs.states_ASH, opd=rule.options.opd
        )
        self.path_scale = loss_scale(denominators[1:], inputs.states_ASH)
        self.weights = list(rule.path_head.parameters())
        self.with_grads = torch.is_grad_enabled()
        self.rows = [torch.zeros_like(rows) for rows in (inputs.states_ASH, inputs.anchor_AH)]
        """Gradients of the states and of the anchors."""
        self.sums = [torch.zeros_like(weight, dtype=self.path_scale.dtype) for weight in self.weights]
        """Gradients of the weights, in float32 or wider, because chunks are summed."""

    def add(self, guesses: CountedGuesses, counted: CountedGuesses) -> None:
        """Add the loss, metrics and gradients of one chunk: ``guesses`` are all of its blocks."""
        rule = self.rule
        num_guesses = len(rule.weight_S)
        blocks = slice(guesses.first, guesses.first + len(guesses.counted_A))
        counted_AS = counted.counted_A[:, None] > torch.arange(num_guesses)
        counted_R = to_device_async(counted_AS.flatten(), guesses.anchor_R.device)
        label_R = self.batch.input_ids_T[torch.where(counted_R, guesses.label_R, guesses.anchor_R)]
        states_BSH = self.inputs.states_ASH[blocks]
        compared = rule.compare(states_BSH.flatten(0, 1), label_R, guesses, self.batch)
        log_prob_RC = compared.found.logits_RC - compared.head[1][:, None]
        leaves = (
            states_BSH.detach(),
            self.inputs.anchor_AH[blocks].detach(),
            log_prob_RC.unflatten(0, (-1, num_guesses)),
        )
        weight_R = path_weight_R = self.factors.of(guesses) * counted_R
        with torch.enable_grad():  # in an evaluation, too: attention has other roundings without gradients
            leaves = [leaf.requires_grad_() for leaf in leaves]
            path, path_loss_BS = self._path(compared, counted_R, self.inputs.has_anchor_A[blocks], *leaves)
            path_loss_R = path_loss_BS.flatten()
            if self.factors.are_judged:
                row_X = self.factors.refused(guesses)
                weight_R = weight_R.index_fill(0, row_X, 0)
                path_loss_R = path_loss_R.index_copy(0, row_X, path.reverse_kl(compared).flatten()[row_X])
            else:
                path_weight_R = self.path_scale.expand_as(weight_R)
            total = (path_loss_R * path_weight_R).sum()
        weighted_R = weight_R * compared.loss_R + path_weight_R * path_loss_R.detach()
        self._measure(compared, path, path_loss_R.detach(), weighted_R, counted)
        if self.with_grads:
            grads = torch.autograd.grad(total, [*leaves, *self.weights])
            self._add_gradients(compared, weight_R, blocks, grads)

    def _path(
        self,
        compared: HeadGuesses,
        counted_R: Tensor,
        has_anchor_B: Tensor,
        states_BSH: Tensor,
        anchor_BH: Tensor,
        log_prob_BSC: Tensor,
    ) -> tuple[_Path, Tensor]:
        shape = log_prob_BSC.shape
        embedded_BSCH = self.rule.ops.embed(compared.found.id_RC.view(shape))
        scores = self.rule.path_head(embedded_BSCH, log_prob_BSC, states_BSH, anchor_BH, has_anchor_B)
        path = _Path.of(scores, compared.is_label_RC.view(shape), counted_R.view(shape[:2]))
        return path, path.loss(compared.target_RC.view(shape), self.rule.options)

    def _measure(
        self,
        compared: HeadGuesses,
        path: _Path,
        path_loss_R: Tensor,
        weighted_R: Tensor,
        counted: CountedGuesses,
    ) -> None:
        """Add the values of the guesses that count. A guess to which no path leads counts as wrong."""
        choice_R1 = path.score_BSC.argmax(-1).view(-1, 1)
        guess_R, chance_R = (
            at.gather(1, choice_R1).squeeze(1) for at in (compared.found.id_RC, compared.prob_RC)
        )
        reached_R = path.reached_BS.flatten()
        values = {
            "weighted_R": weighted_R,
            "accuracy": (guess_R == compared.label_R) & reached_R,
            "acceptance_t1": chance_R * reached_R,
            "head_accuracy": compared.best_R == compared.label_R,
            "recall": compared.is_label_RC.any(1),
            "head_loss": compared.loss_R,
            "path_loss": path_loss_R,
        }
        place_R = (counted.block_R - counted.first) * path.score_BSC.shape[1] + counted.guess_R
        self.metrics.add(**{name: value[place_R] for name, value in values.items()})

    def _add_gradients(
        self, compared: HeadGuesses, weight_R: Tensor, blocks: slice, grads: tuple[Tensor, ...]
    ) -> None:
        grad_BSH, grad_BH, grad_BSC, *of_weights = grads
        grad_RC = grad_BSC.flatten(0, 1)
        # A log-probability is the logit minus the logits' log-sum-exp.
        grad_RH = self.rule.states_gradient(compared, weight_R, grad_RC, normalised_R=-grad_RC.sum(1))
        self.rows[0][blocks] = grad_BSH + grad_RH.view(grad_BSH.shape)
        self.rows[1][blocks] = grad_BH
        for total, grad in zip(self.sums, of_weights, strict=True):
            total += grad

    def output(self) -> StepOutput:
        """Return loss and metrics, with the gradients attached to the loss."""
        loss = self.metrics.loss(self.path_scale)
        if self.with_grads:
            inputs = self.inputs.states_ASH, self.inputs.anchor_AH, *self.weights
            loss = with_gradients(loss, (*self.rows, *self.sums), inputs)
        return self.metrics.output(loss, self.batch)
