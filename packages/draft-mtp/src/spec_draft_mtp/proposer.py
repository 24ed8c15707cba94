"""Reference drafting for MTP: guesses one after the other, with a key-value cache of the known positions.

Shapes: T new positions, L cached positions, K guesses, H width, N heads, D channels of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from spec_core import Proposal, Proposer
from spec_kit.drafting import draw, rotate, uniform_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator, Tensor

    from spec_core import VocabularyOps
    from spec_draft_mtp.model import MtpModel

    Cache = tuple[Tensor, Tensor]
    """Keys and values [L, N, D]."""


class MtpProposer(Proposer):
    """Guesses one token after the other, beginning with the hidden state of the last known token.

    Training unrolls the head for several steps. Guess s + 1 is computed as in unrolled step s.
    """

    def __init__(self, module: MtpModel, ops: VocabularyOps) -> None:
        """Start with an empty cache."""
        self._module, self._ops = module, ops
        weight, shape = module.mtp.fc.weight, module.shape
        empty = weight.new_zeros(0, shape.num_kv_heads, shape.head_dim)
        self._cache: Cache = (empty, empty)
        self._last_1H = weight.new_zeros(1, shape.hidden_size)

    @torch.no_grad()
    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Add keys and values of T more positions to the cache."""
        ids_T = torch.tensor(list(next_ids), device=self._last_1H.device)
        state_TH = self._module.first_state(hidden_TNH.to(self._last_1H.device))
        state_TH, self._cache = self._step(ids_T, state_TH, self._cache)
        self._last_1H = state_TH[-1:]

    @torch.no_grad()
    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Guess one token after the other; keys and values of guesses are not cached."""
        state_1H, cache, ids, probs = self._last_1H, self._cache, list[torch.Tensor](), list[torch.Tensor]()
        uniform_1K = uniform_numbers([generator], num_tokens) if temperature > 0 else None
        for step in range(num_tokens):
            if ids:
                state_1H, cache = self._step(ids[-1], state_1H, cache)
            logits_1V = (state_1H @ self._ops.head_VH.T).float()
            if uniform_1K is None:
                ids.append(logits_1V.argmax(-1))
            else:
                probs.append((logits_1V / temperature).softmax(-1))
                ids.append(draw(probs[-1], uniform_1K[:, step].to(logits_1V.device)))
        chosen: list[int] = torch.cat(ids).tolist()
        return Proposal(token_ids=tuple(chosen), probs_KV=torch.cat(probs) if probs else None)

    def _step(self, ids_T: Tensor, state_TH: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Return the states after T tokens that follow the cached ones, and the extended cache."""
        mtp, num_cached = self._module.mtp, len(cache[0])
        x_TH = mtp.join(self._ops.embed(ids_T), state_TH)
        q, k, v, gate = mtp.layer.qkv_gate(x_TH)
        column_L = torch.arange(num_cached + len(ids_T), device=ids_T.device)
        angles = self._module.rope.angles(column_L[num_cached:], q.dtype)
        keys, values = torch.cat([cache[0], rotate(k, angles)]), torch.cat([cache[1], v])
        heads = (part.transpose(0, 1)[None] for part in (rotate(q, angles), keys, values))
        visible_TL = column_L <= column_L[num_cached:, None]
        out = F.scaled_dot_product_attention(*heads, attn_mask=visible_TL, enable_gqa=True)
        last_TH = mtp.layer.finish(x_TH, out[0].transpose(0, 1), gate)
        return mtp.norm(last_TH), (keys, values)
