"""Draft with MTP in plain torch, as a reference: guesses are made one after the other.

The KV caches hold the known positions.

Shapes: B sequences, T new positions of all sequences, K guesses, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Generator, Tensor

from spec_core import Proposal, VocabularyOps
from spec_draft_mtp.model import MtpModel
from spec_kit.drafting import BatchProposer, Guesses
from spec_kit.layers import cached_attention, extended_caches, new_positions, rotate

Cache = tuple[Tensor, Tensor]
"""Keys and values of one sequence, [L, kv_heads, head_dim]."""


class MtpProposer(BatchProposer):
    """Guesses one token after the other; the first guess starts from the last known position's state.

    Training unrolls the head for several steps. Guess s + 1 is computed like unrolled step s.
    """

    def __init__(self, module: MtpModel, ops: VocabularyOps) -> None:
        """Start with an empty cache."""
        self._module = module
        self._ops = ops
        weight = module.mtp.fc.weight
        shape = module.shape
        heads, width = shape.cache_shape
        self._cache: Cache = (
            weight.new_zeros(0, heads, width),
            weight.new_zeros(0, heads, shape.value_width),
        )
        self._last_H = weight.new_zeros(shape.hidden_size)

    @classmethod
    @torch.no_grad()
    def extend_all(
        cls, proposers: Sequence[Self], next_ids: Sequence[Sequence[int]], hidden: Sequence[Tensor]
    ) -> None:
        """Add keys and values of more positions of every sequence to the caches, in one forward pass."""
        first = proposers[0]
        counts = [len(ids) for ids in next_ids]
        device = first._last_H.device
        ids_T = torch.tensor([token for ids in next_ids for token in ids], dtype=torch.int64, device=device)
        state_TH = first._module.first_state(torch.cat(list(hidden)).to(device))
        state_TH, caches = first._step(ids_T, state_TH, [p._cache for p in proposers], counts)
        ends = zip(state_TH.split(counts), caches, strict=True)
        for proposer, (states, cache) in zip(proposers, ends, strict=True):
            proposer._last_H = states[-1]
            proposer._cache = cache

    @classmethod
    def guess_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Guess tokens one after the other, for all sequences at once.

        Keys and values of guesses are not kept in the caches.
        """
        first = proposers[0]
        counts = [1] * len(proposers)
        state_BH = torch.stack([p._last_H for p in proposers])
        caches = [p._cache for p in proposers]
        guesses = Guesses(num_tokens, temperature, generators)
        id_B = None
        for _ in range(num_tokens):
            if id_B is not None:
                state_BH, caches = first._step(id_B, state_BH, caches, counts)
            id_B = guesses.choose((state_BH @ first._ops.head_VH.T).float())
        return guesses.proposals()

    def _step(
        self, ids_T: Tensor, state_TH: Tensor, caches: Sequence[Cache], counts: Sequence[int]
    ) -> tuple[Tensor, list[Cache]]:
        """Return the head's states at new tokens, and the extended caches.

        Sequence i has ``counts[i]`` new tokens, which follow the positions in cache i.
        """
        mtp = self._module.mtp
        position_T = new_positions(caches, counts)
        x_TH = mtp.join(self._ops.embed(ids_T), state_TH, position_T)
        angles = self._module.rope.angles(position_T, x_TH.dtype)
        q, k, v, *rest = mtp.layer.qkv(x_TH, lambda heads: rotate(heads, angles))
        caches = extended_caches(caches, k, v, counts)
        attended = cached_attention(q, caches, counts)
        return mtp.norm(mtp.layer.finish(x_TH, attended, *rest)), caches
