"""Draft one block per round (reference drafting), with a KV cache of the context in each layer.

Shape suffixes: A sequences, each with one block; B slots of a block in ``x_ABH``, else B sequences; K guesses, T new
positions of all sequences, H width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Generator, Tensor

from spec_core import Proposal, VocabularyOps
from spec_core.errors import ConfigError
from spec_kit.block_drafting.attention import BlockLayout, KeysValues
from spec_kit.block_drafting.backbone import BlockBackbone
from spec_kit.block_drafting.head import BlockHead
from spec_kit.drafting import BatchProposer
from spec_kit.layers import extended_caches, new_positions


class BlockProposer(BatchProposer):
    """Guesses one block per round. The subclass of each draft defines ``guess_all``."""

    def __init__(self, module: BlockBackbone, ops: VocabularyOps, num_guesses: int) -> None:
        """Start with an empty context. ``num_guesses``: largest number of guesses of a block."""
        self.module = module
        self.ops = ops
        self._most = num_guesses
        shape = module.shape
        self.last_id = 0
        self._empty = torch.zeros(0, dtype=torch.int64)
        none = module.fc.weight.new_zeros(0, shape.num_kv_heads, shape.head_dim)
        self._contexts: list[KeysValues] = [(none, none)] * shape.num_layers

    @classmethod
    @torch.no_grad()
    def extend_all(  # pyright: ignore[reportIncompatibleMethodOverride] (Self is narrower)
        cls, proposers: Sequence[Self], next_ids: Sequence[Sequence[int]], hidden: Sequence[Tensor]
    ) -> None:
        """Extend every sequence's KV cache by more positions, in one pass over all sequences.

        A sequence's next block starts with the last of its ``next_ids``.
        """
        module = proposers[0].module
        counts = [len(ids) for ids in next_ids]
        context_TH = module.context(torch.cat(list(hidden)).to(module.fc.weight.device))
        position_T = new_positions([p._contexts[0] for p in proposers], counts)
        angles = module.rope.angles(position_T, context_TH.dtype)
        for index, layer in enumerate(module.decoder_layers):
            k_T, v_T = layer.self_attn.keys_values(context_TH, angles)
            contexts = extended_caches([p._contexts[index] for p in proposers], k_T, v_T, counts)
            for proposer, context in zip(proposers, contexts, strict=True):
                proposer._contexts[index] = context
        for proposer, ids in zip(proposers, next_ids, strict=True):
            proposer.last_id = ids[-1]

    @classmethod
    def propose_all(  # pyright: ignore[reportIncompatibleMethodOverride] (Self is narrower)
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Guess one block for each sequence. Raise ConfigError for more guesses than a block has."""
        most = proposers[0]._most
        if num_tokens > most:
            raise ConfigError(
                f"num_tokens={num_tokens} asked of a draft with blocks of {proposers[0].module.shape.block_size}; "
                f"it guesses at most {most}"
            )
        return super().propose_all(proposers, num_tokens, temperature, generators)

    @classmethod
    def choose_from(cls, proposers: Sequence[Self]) -> tuple[Tensor, tuple[Tensor, int] | None]:
        """Return the head's weight, and the tokens of its rows as ``Guesses.choose`` takes them."""
        module, ops = proposers[0].module, proposers[0].ops
        return BlockHead.of(ops, module).products.weight, module.head_tokens

    @property
    def _length(self) -> int:
        return len(self._contexts[0][0])

    @classmethod
    def states(cls, proposers: Sequence[Self], num_slots: int) -> Tensor:
        """Return the inputs of the head, [sequences, slots, H], for one block after each sequence's context.

        The contexts are concatenated, like the documents of a training batch.
        """
        first = proposers[0]
        module = first.module
        device = module.fc.weight.device
        lengths = torch.tensor([p._length for p in proposers])
        stop_A = lengths.cumsum(0)
        layout = BlockLayout(stop_A, stop_A - lengths, device)
        last_A = torch.tensor([p.last_id for p in proposers], device=device)
        x_ABH = module.embed(last_A, num_slots, first.ops)
        geometry = module.geometry(layout, num_slots, first._empty.to(device), x_ABH.dtype)
        for index, layer in enumerate(module.decoder_layers):
            keys, values = zip(*(p._contexts[index] for p in proposers), strict=True)
            x_ABH = layer.advance(x_ABH, (torch.cat(keys), torch.cat(values)), geometry)
        return module.norm(x_ABH)
