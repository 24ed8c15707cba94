"""Verification of a draft's guesses by the target's logits: greedy matching, and speculative rejection sampling.

Rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): a guess x drawn from q is
accepted with probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from (p − q)₊,
normalised. Whatever q is, the tokens that come out follow p.

Shape suffixes: K guesses, R = K + 1 rows of logits, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from spec_core import Proposal


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a verification: the first ``accepted`` guesses stand, and ``next_token`` follows them."""

    accepted: int
    next_token: int


def verify(
    logits_RV: Tensor, proposal: Proposal, temperature: float, generator: Generator, top_p: float = 1.0
) -> Verdict:
    """Verify K guesses by K + 1 rows of logits; without guesses this is plain decoding."""
    if temperature == 0:
        return _verify_greedy(logits_RV, proposal)
    return _verify_sampled(distribution(logits_RV, temperature, top_p), proposal, generator)


def distribution(logits_RV: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Return float64 probabilities at ``temperature`` > 0; their differences decide, so float32 would not do.

    ``top_p`` < 1 keeps the fewest most likely tokens that together have that probability.
    """
    probs_RV = torch.softmax(logits_RV.double() / temperature, dim=-1)
    if top_p < 1:
        sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
        beyond_RV = sorted_RV.cumsum(dim=-1) - sorted_RV >= top_p
        probs_RV = probs_RV.masked_fill(beyond_RV.gather(-1, order_RV.argsort(dim=-1)), 0)
        probs_RV = probs_RV / probs_RV.sum(dim=-1, keepdim=True)
    return probs_RV


def draw(probs_V: Tensor, generator: Generator) -> int:
    """Return a token drawn from a distribution."""
    return int(torch.multinomial(probs_V, 1, generator=generator))


def _verify_greedy(logits_RV: Tensor, proposal: Proposal) -> Verdict:
    best: list[int] = logits_RV.argmax(dim=-1).tolist()
    accepted = 0
    for guess, wanted in zip(proposal.token_ids, best, strict=False):
        if guess != wanted:
            break
        accepted += 1
    return Verdict(accepted=accepted, next_token=best[accepted])


def _verify_sampled(probs_RV: Tensor, proposal: Proposal, generator: Generator) -> Verdict:
    for position, guess in enumerate(proposal.token_ids):
        p_V, q_V = probs_RV[position], _guess_distribution(proposal, position, probs_RV)
        chance = torch.rand((), dtype=torch.float64, device=probs_RV.device, generator=generator)
        if chance * q_V[guess] >= p_V[guess]:
            return Verdict(accepted=position, next_token=draw(_residual(p_V, q_V), generator))
    return Verdict(accepted=len(proposal.token_ids), next_token=draw(probs_RV[-1], generator))


def _guess_distribution(proposal: Proposal, position: int, like_RV: Tensor) -> Tensor:
    if proposal.probs_KV is not None:
        return proposal.probs_KV[position].to(like_RV)
    certain_V = torch.zeros_like(like_RV[0])
    certain_V[proposal.token_ids[position]] = 1
    return certain_V


def _residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    rest_V = (p_V - q_V).clamp(min=0)
    # p = q leaves nothing, and a rejection then is rounding: p itself is right.
    return rest_V if rest_V.sum() > 0 else p_V
