"""Draft with P-EAGLE in plain torch, as a reference: one pass over the cached rows makes all guesses.

Shapes: B sequences, T new positions of all sequences, K guesses, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Generator, Tensor

from spec_core import Proposal, VocabularyOps
from spec_draft_peagle.model import PEagleModel
from spec_kit.block_drafting import KeysValues
from spec_kit.drafting import BatchProposer, Guesses
from spec_kit.layers import cached_attention, extended_caches, new_positions


class PEagleProposer(BatchProposer):
    """Guesses the first token from the last row's state, and each further token from one mask token."""

    def __init__(self, module: PEagleModel, ops: VocabularyOps) -> None:
        """Start with an empty cache."""
        self._module = module
        self._ops = ops
        shape = module.shape
        weight = module.fc.weight
        empty = weight.new_zeros(0, shape.num_kv_heads, shape.head_dim)
        self._caches: list[KeysValues] = [(empty, empty)] * shape.num_layers
        self._last_H = weight.new_zeros(shape.hidden_size)

    @classmethod
    @torch.no_grad()
    def extend_all(
        cls, proposers: Sequence[Self], next_ids: Sequence[Sequence[int]], hidden: Sequence[Tensor]
    ) -> None:
        """Add keys and values of more rows of every sequence to the caches, in one forward pass.

        The last captured state, which is the final norm's input, is not used.
        """
        module = proposers[0]._module
        counts = [len(ids) for ids in next_ids]
        device = module.fc.weight.device
        ids_T = torch.tensor([token for ids in next_ids for token in ids], dtype=torch.int64, device=device)
        hidden_TH = module.fuse(torch.cat(list(hidden))[:, :-1].to(device))
        state_TH, caches = cls._advance(proposers, ids_T, hidden_TH, counts)
        for index, proposer in enumerate(proposers):
            proposer._caches = [layer[index] for layer in caches]
        for proposer, states in zip(proposers, state_TH.split(counts), strict=True):
            proposer._last_H = states[-1]

    @classmethod
    def guess_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Guess all tokens of all sequences in one pass; keys and values of mask tokens are not cached."""
        module = proposers[0]._module
        num_masks = num_tokens - 1
        state_BKH = torch.stack([p._last_H for p in proposers])[:, None]
        if num_masks:
            hidden_TH = module.mask_states(num_masks * len(proposers))
            ids_T = torch.full((len(hidden_TH),), module.shape.mask_token_id, device=hidden_TH.device)
            mask_TH, _ = cls._advance(proposers, ids_T, hidden_TH, [num_masks] * len(proposers))
            state_BKH = torch.cat([state_BKH, mask_TH.unflatten(0, (-1, num_masks))], dim=1)
        logits_BKV = module.lm_head(state_BKH).float()
        guesses = Guesses(num_tokens, temperature, generators)
        for k in range(num_tokens):
            guesses.choose(logits_BKV[:, k], module.head_tokens)
        return guesses.proposals()

    @staticmethod
    def _advance(
        proposers: Sequence[PEagleProposer], ids_T: Tensor, hidden_TH: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, list[list[KeysValues]]]:
        """Return the states [T, H] at new tokens, and each layer's extended caches.

        Sequence i has ``counts[i]`` new tokens.
        """
        module, ops = proposers[0]._module, proposers[0]._ops
        position_T = new_positions([p._caches[0] for p in proposers], counts)
        embedded_TH = ops.embed(ids_T)
        angles = module.rope.angles(position_T, hidden_TH.dtype)
        layers: list[list[KeysValues]] = []
        for index, layer in enumerate(module.decoder_layers):
            hidden_TH = layer.start(hidden_TH)
            q, k, v = layer.qkv((hidden_TH, embedded_TH), angles)
            layers.append(extended_caches([p._caches[index] for p in proposers], k, v, counts))
            hidden_TH = layer.finish(hidden_TH, cached_attention(q, layers[-1], counts))
        return module.norm(hidden_TH), layers
