"""Compute loss, metrics and gradients of the guesses that count in the loss, some guesses at a time.

One pass over chunks of guesses computes all three, so only one chunk's logits are in memory. All guesses after the
same token share the teacher's distribution, so they are in the same chunk. Every guess has the same weight.

Shapes: E guesses that count in the loss, K guesses of a chain, R guesses of a chunk, U tokens before them, V rows of
the draft's head on this shard (see ``spec_core.ops``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_core import LinearWeight, VocabularyOps
from spec_core.records import DraftBatch, StepOutput
from spec_draft_peagle.chains import GuessesByToken
from spec_draft_peagle.kernels import PEagleKernels
from spec_kit.drafting import DistilledLoss
from spec_kit.layers import ROW_LOSSES, score, teach, with_gradients, with_rounds

_VALUES = ("accuracy", "acceptance", "acceptance_t1", "guess_loss")


@dataclass(frozen=True, kw_only=True)
class PEagleLoss:
    """Computes the loss of guesses: compares the draft's distributions with the target's distributions."""

    head: LinearWeight
    ids_V: Tensor
    """int64: token id of each row of the head."""
    vocab_mask_V: Tensor | None
    """bool [target vocabulary]: whether a token has a row in the head. None means that all tokens have a
    row."""
    kind: DistilledLoss
    ops: VocabularyOps
    kernels: PEagleKernels

    def __call__(
        self, states_EH: Tensor, batch: DraftBatch, guesses_3E: Tensor, denominators: Tensor
    ) -> StepOutput:
        """Return loss and metrics of the guesses.

        The batch's last captured state is the input of the target's final norm. ``guesses_3E``: see
        ``Chains.guesses``, on the CPU.
        ``denominators``: float64 [2 K], the global batch's number of guesses that count at each index of a
        chain, then the numbers before the drop.
        """
        guesses = GuessesByToken.of(guesses_3E, states_EH.device)
        totals = _Sums(self, states_EH, guesses, denominators)
        # A guess has its own logits, in the head's dtype, and the teacher's over the draft's ids, in float32.
        guess_bytes = (self.head.weight.element_size() + 4) * len(self.head.weight)
        with torch.no_grad():
            chunks = guesses.chunks(self.ops.chunk_bytes, 4 * self.ops.shard_rows, guess_bytes)
            for tokens, chunk in chunks:
                totals.add(tokens, chunk, batch)
        return totals.output(batch)


class _Sums:
    """Sums of one forward pass over all chunks: loss, metrics, and gradients if they are enabled."""

    def __init__(
        self, rule: PEagleLoss, states_EH: Tensor, guesses: GuessesByToken, denominators: Tensor
    ) -> None:
        self.rule = rule
        self.states_EH = states_EH
        self.guesses = guesses
        wide = torch.promote_types(states_EH.dtype, torch.float32)
        self.kept_K, self.reached_K = denominators.to(states_EH.device).chunk(2)
        total = self.kept_K.sum()
        self.scale = torch.where(total > 0, 1 / total.clamp(min=1), 0).to(wide)
        zeros = self.scale.new_zeros
        self.loss = zeros(())
        self.sums = {name: zeros(len(self.kept_K)) for name in _VALUES}
        self.agreed_E, self.matched_E, self.chance_E = zeros(3, len(states_EH))
        """Whether a guess is the target's arg-max, whether it is the data's token, and the target's probability."""
        self.grads: tuple[Tensor, Tensor] | None = None
        if torch.is_grad_enabled():
            self.grads = torch.zeros_like(states_EH), zeros(rule.head.weight.shape)

    def add(self, tokens: slice, chunk: slice, batch: DraftBatch) -> None:
        """Add loss, metrics and gradients of the guesses of a chunk. ``tokens``: the tokens before these guesses."""
        token_U = self.guesses.token_U[tokens]
        teacher_R = self.guesses.teacher_E[chunk] - tokens.start
        hidden_UH = batch.hidden_TNH[token_U, -1]
        rule = self.rule
        guess_R = self.guesses.guess_E[chunk]
        state_R = self.guesses.state_E[chunk]
        input_RH = self.states_EH[state_R]
        ops = rule.ops
        kernels = rule.kernels
        teacher = teach(ops, kernels, hidden_UH, rule.ids_V, rule.vocab_mask_V)
        teacher = teacher.take(teacher_R)
        logits_RV = rule.head.forward(input_RH)
        scored = score(logits_RV[:, None], rule.ids_V, teacher, ops, kernels)
        value_R1, factors = ROW_LOSSES[rule.kind](scored, teacher, ops, kernels)
        trained_R1 = teacher.trained_R[:, None].to(self.scale.dtype)
        self.loss += (value_R1 * trained_R1).sum() * self.scale
        best_R = scored.best_RS[:, 0]
        wide = self.scale.dtype
        self.agreed_E[chunk] = (best_R == teacher.best_R).to(wide)
        self.matched_E[chunk] = (best_R == batch.input_ids_T[token_U + 1][teacher_R]).to(wide)
        self.chance_E[chunk] = scored.chance_RS[:, 0].to(wide)
        self.sums["guess_loss"].index_add_(0, guess_R, (value_R1 * trained_R1)[:, 0].to(self.scale.dtype))
        self.sums["acceptance"].index_add_(0, guess_R, scored.overlap_RS[:, 0].to(self.scale.dtype))
        self.sums["acceptance_t1"].index_add_(0, guess_R, self.chance_E[chunk])
        self.sums["accuracy"].index_add_(0, guess_R, self.agreed_E[chunk])
        if self.grads is None:
            return
        a, b, c = (factor * trained_R1 * self.scale for factor in factors)
        grad_RV = kernels.distill_grad_(
            logits_RV[:, None], scored.log_sum_RS, (a, b, c), teacher.distribution, teacher.in_vocab_mass_R
        )[:, 0]
        self.grads[0].index_copy_(0, state_R, ops.reduce_sum(rule.head.backward(grad_RV)))
        self.grads[1].add_(grad_RV.T @ input_RH)

    def output(self, batch: DraftBatch) -> StepOutput:
        """Return loss and metrics.

        A chain's acceptance length is 1 + the number of guesses that are accepted before the first that is not. The
        target at temperature 0 accepts its own arg-max. At temperature 1, it accepts a guess with its probability for
        it, and the chain goes on with the guess only if the data do. Dropped guesses are estimated from the other
        guesses: the sum over the k-th guesses is multiplied by their number before the drop, and divided by their
        number after it.
        """
        counts_K = torch.zeros_like(self.kept_K, dtype=torch.int64)
        counts_K.index_add_(0, self.guesses.guess_E, torch.ones_like(self.guesses.guess_E))
        weight_K = torch.where(self.kept_K > 0, self.reached_K / self.kept_K.clamp(min=1), 0).to(
            self.scale.dtype
        )
        agreed_CK, matched_CK, chance_CK = self._chains(len(batch.input_ids_T))
        agreed_CK, matched_CK = agreed_CK.cumprod(1), matched_CK.cumprod(1)
        before_CK = matched_CK.roll(1, 1)
        before_CK[:, :1] = 1
        accepted = {
            "acceptance_length": agreed_CK,
            "acceptance_length_t1": before_CK * chance_CK,
            "acceptance_length_data": matched_CK,
        }
        lengths = {
            name: counts_K[0] + (value_CK.sum(0) * weight_K).sum() for name, value_CK in accepted.items()
        }
        loss = self.loss
        if self.grads is not None:
            loss = with_gradients(loss, self.grads, (self.states_EH, self.rule.head.weight))
        output = StepOutput(
            loss=loss,
            sums=self.sums | lengths,
            counts=dict.fromkeys(self.sums, counts_K) | dict.fromkeys(lengths, counts_K[0]),
        )
        if not batch.evaluates:
            return output
        first_E = self.guesses.guess_E == 0
        last_A = self.guesses.token_U[self.guesses.teacher_E[first_E]]
        return with_rounds(output, last_A, matched_CK[self.guesses.chain_E[first_E]], after_prompts=True)

    def _chains(self, most_chains: int) -> Tensor:
        """Return agreements, matches and probabilities of each chain's guesses, [3, chains, K]; 0 for no guess.

        ``most_chains``: upper limit of the number of chains.
        """
        values_3E = torch.stack([self.agreed_E, self.matched_E, self.chance_E])
        table_3CK = values_3E.new_zeros(3, most_chains, len(self.kept_K))
        table_3CK[:, self.guesses.chain_E, self.guesses.guess_E] = values_3E
        return table_3CK
