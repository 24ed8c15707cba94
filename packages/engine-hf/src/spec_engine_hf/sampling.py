"""Verification of a draft's guesses by the target's logits: greedy matching, and speculative rejection sampling.

Rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): a guess x drawn from q is
accepted with probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from (p − q)₊,
normalised. Whatever q is, the tokens that come out follow p.

Shape suffixes: B sequences, K guesses, R rows of logits (one more than guesses), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spec_core.drafting import draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from spec_core import Proposal


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a verification: the first ``accepted`` guesses stand, and ``next_token`` follows them."""

    accepted: int
    next_token: int


def verify_greedy(best: Sequence[int], proposal: Proposal) -> Verdict:
    """Verify K guesses by the target's choices in their places, K + 1 or more."""
    accepted = 0
    for guess, wanted in zip(proposal.token_ids, best, strict=False):
        if guess != wanted:
            break
        accepted += 1
    return Verdict(accepted=accepted, next_token=best[accepted])


def verify_sampled(probs_BRV: Tensor, proposals: Sequence[Proposal], uniform_BR: Tensor) -> list[Verdict]:
    """Verify the guesses of every sequence by float64 distributions of the target; without guesses, draw.

    ``uniform_BR``: numbers in [0, 1), of which the last decides the next token and the others the guesses.
    """
    accepted = _accepted(probs_BRV, proposals, uniform_BR)
    rest_BV = torch.stack(
        [
            _distribution_behind(probs_RV, proposal, count)
            for probs_RV, proposal, count in zip(probs_BRV, proposals, accepted, strict=True)
        ]
    )
    next_tokens: list[int] = draw(rest_BV, uniform_BR[:, -1]).tolist()
    return [Verdict(accepted=a, next_token=t) for a, t in zip(accepted, next_tokens, strict=True)]


def distribution(logits_RV: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Return float64 probabilities of logits [..., V] at ``temperature`` > 0.

    Their differences decide, so float32 would not do. ``top_p`` < 1 keeps the fewest most likely tokens that together
    have that probability.
    """
    probs_RV = torch.softmax(logits_RV.double() / temperature, dim=-1)
    if top_p < 1:
        sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
        beyond_RV = sorted_RV.cumsum(dim=-1) - sorted_RV >= top_p
        probs_RV = probs_RV.masked_fill(beyond_RV.gather(-1, order_RV.argsort(dim=-1)), 0)
        probs_RV = probs_RV / probs_RV.sum(dim=-1, keepdim=True)
    return probs_RV


def _accepted(probs_BRV: Tensor, proposals: Sequence[Proposal], uniform_BR: Tensor) -> list[int]:
    """Return how many guesses of each sequence stand: those before the first that is rejected."""
    longest = max(len(proposal.token_ids) for proposal in proposals)
    if longest == 0:
        return [0] * len(proposals)
    rows = [[*p.token_ids, *[-1] * (longest - len(p.token_ids))] for p in proposals]
    guess_BK = torch.tensor(rows, device=probs_BRV.device)
    place_BK1 = guess_BK.clamp(min=0)[..., None]
    p_BK = probs_BRV[:, :longest].gather(-1, place_BK1)[..., 0]
    q_BK = torch.stack([_chances(p, place_K1) for p, place_K1 in zip(proposals, place_BK1, strict=True)])
    stands_BK = (uniform_BR[:, :longest] * q_BK < p_BK) & (guess_BK >= 0)
    accepted: list[int] = stands_BK.cumprod(dim=1).sum(dim=1).tolist()
    return accepted


def _chances(proposal: Proposal, place_K1: Tensor) -> Tensor:
    """Return float64 [K], with what probability the draft made each guess; 1 behind the last one."""
    chance_K = torch.ones(len(place_K1), dtype=torch.float64, device=place_K1.device)
    if proposal.probs_KV is not None:
        own = len(proposal.token_ids)
        chance_K[:own] = proposal.probs_KV.gather(-1, place_K1[:own])[:, 0].to(chance_K)
    return chance_K


def _distribution_behind(probs_RV: Tensor, proposal: Proposal, accepted: int) -> Tensor:
    """Return what the next token follows: the target behind all guesses, else what a rejection leaves of it."""
    p_V = probs_RV[accepted]
    if accepted == len(proposal.token_ids):
        return p_V
    if proposal.probs_KV is None:
        rest_V = p_V.clone()
        rest_V[proposal.token_ids[accepted]] = 0
    else:
        rest_V = (p_V - proposal.probs_KV[accepted].to(p_V)).clamp(min=0)
    # p = q leaves nothing, and a rejection then is rounding: p itself is right.
    return torch.where(rest_V.sum() > 0, rest_V, p_V)
