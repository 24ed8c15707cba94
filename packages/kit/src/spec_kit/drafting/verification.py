"""Verify a draft's guesses by the target's logits: greedy matching, and speculative rejection sampling.

Rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): a guess x drawn from the
draft's distribution q is accepted with probability min(1, p(x) / q(x)), where p is the target's distribution. The
first rejected guess is replaced by a draw from max(p − q, 0), normalised. Whatever q is, the resulting tokens
follow p.

Shape suffixes: B sequences, K guesses, R rows of logits (one more than guesses), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_core import Proposal
from spec_kit.drafting.drawing import draw


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a verification: how many guesses are accepted, from the first on, and the next token."""

    accepted: int
    next_token: int


def verify_greedy(best: Sequence[int], proposal: Proposal) -> Verdict:
    """Verify K guesses by greedy matching. ``best``: the target's K + 1 or more arg-max tokens."""
    accepted = 0
    for guess, wanted in zip(proposal.token_ids, best, strict=False):
        if guess != wanted:
            break
        accepted += 1
    return Verdict(accepted=accepted, next_token=best[accepted])


def verify_sampled(probs_BRV: Tensor, proposals: Sequence[Proposal], uniform_BR: Tensor) -> list[Verdict]:
    """Verify the guesses of every sequence by rejection sampling; without guesses, draw the next token.

    ``probs_BRV``: the target's distributions, float64. ``uniform_BR``: numbers in [0, 1); the last of a sequence
    draws the next token, the others decide on the guesses.
    """
    sequence_B = torch.arange(len(proposals), device=probs_BRV.device)
    if any(proposal.token_ids for proposal in proposals):
        chance_BKV = _chances(proposals, probs_BRV)
        accepted_B = _accepted(probs_BRV, chance_BKV, proposals, uniform_BR)
        p_BV = probs_BRV[sequence_B, accepted_B]
        rest_BV = (p_BV - chance_BKV[sequence_B, accepted_B]).clamp(min=0)
        # If p = q, nothing is left. A rejection is then a rounding error, and the token is drawn from p.
        rest_BV = torch.where(rest_BV.sum(dim=-1, keepdim=True) > 0, rest_BV, p_BV)
    else:
        accepted_B = torch.zeros_like(sequence_B)
        rest_BV = probs_BRV[:, 0]
    next_B = draw(rest_BV, uniform_BR[:, -1])
    verdicts: list[list[int]] = torch.stack([accepted_B, next_B], dim=1).tolist()
    return [Verdict(accepted=accepted, next_token=token) for accepted, token in verdicts]


def distribution(logits_RV: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Return the float64 probabilities of logits [..., V] at ``temperature`` > 0.

    Verification uses differences of probabilities, for which float32 is too coarse. ``top_p`` < 1 keeps only the
    fewest most likely tokens whose total probability is at least ``top_p``.
    """
    probs_RV = torch.softmax(logits_RV.double() / temperature, dim=-1)
    if top_p < 1:
        sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
        beyond_RV = sorted_RV.cumsum(dim=-1) - sorted_RV >= top_p
        probs_RV = probs_RV.masked_fill(beyond_RV.gather(-1, order_RV.argsort(dim=-1)), 0)
        probs_RV = probs_RV / probs_RV.sum(dim=-1, keepdim=True)
    return probs_RV


def _accepted(
    probs_BRV: Tensor, chance_BKV: Tensor, proposals: Sequence[Proposal], uniform_BR: Tensor
) -> Tensor:
    """Return how many guesses of each sequence come before the first rejected one, int64 [B]."""
    longest = chance_BKV.shape[1] - 1
    rows = [[*p.token_ids, *[-1] * (longest - len(p.token_ids))] for p in proposals]
    guess_BK = torch.tensor(rows, device=probs_BRV.device)
    place_BK1 = guess_BK.clamp(min=0)[..., None]
    p_BK, q_BK = (all_BRV[:, :longest].gather(-1, place_BK1)[..., 0] for all_BRV in (probs_BRV, chance_BKV))
    stands_BK = (uniform_BR[:, :longest] * q_BK < p_BK) & (guess_BK >= 0)
    return stands_BK.cumprod(dim=1).sum(dim=1)


def _chances(proposals: Sequence[Proposal], like: Tensor) -> Tensor:
    """Return the distribution of each guess, [B, K + 1, V]; 0 after a sequence's last guess."""
    chance_BKV = like.new_zeros(len(proposals), 1 + max(len(p.token_ids) for p in proposals), like.shape[-1])
    for chance_KV, proposal in zip(chance_BKV, proposals, strict=True):
        if proposal.probs_KV is not None:
            chance_KV[: len(proposal.probs_KV)] = proposal.probs_KV
        else:
            guess_K1 = torch.tensor(proposal.token_ids, dtype=torch.int64, device=like.device)[:, None]
            chance_KV[: len(guess_K1)].scatter_(1, guess_K1, 1.0)
    return chance_BKV
