"""Reference drafting: one block per round, with the context's keys and values cached per layer.

Shape suffixes: A sequences, each with one block; B slots of a block in ``x_ABH``, else B sequences; K guesses, T new
positions of all sequences, H width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from spec_core import Proposal, Proposer
from spec_core.errors import ConfigError
from spec_draft_dflash.attention import BlockLayout
from spec_kit.drafting import draw, uniform_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator, Tensor

    from spec_core import VocabularyOps
    from spec_draft_dflash.attention import KeysValues
    from spec_draft_dflash.model import DFlashModel


class BlockProposer(Proposer):
    """One block per round.

    To guess K tokens, vLLM and SGLang run a block of K + 1 slots, also where K + 1 is below the block size of
    training; so does this.
    """

    def __init__(self, module: DFlashModel, ops: VocabularyOps) -> None:
        """Start with an empty context."""
        self._module, self._ops = module, ops
        shape, self._last = module.shape, 0
        self._empty = torch.zeros(0, dtype=torch.int64)
        none = module.fc.weight.new_zeros(0, shape.num_kv_heads, shape.head_dim)
        self._contexts: list[KeysValues] = [(none, none)] * shape.num_layers

    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Cache keys and values of T more positions; the last of ``next_ids`` begins the next block."""
        self.extend_all([self], [next_ids], [hidden_TNH])

    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Guess with one block; ConfigError for more tokens than a block holds."""
        return self.propose_all([self], num_tokens, temperature, [generator])[0]

    @classmethod
    @torch.no_grad()
    def extend_all(
        cls, proposers: Sequence[Self], next_ids: Sequence[Sequence[int]], hidden: Sequence[Tensor]
    ) -> None:
        """Cache keys and values of more positions of every sequence, by one pass over all of them."""
        module, counts = proposers[0]._module, [len(ids) for ids in next_ids]
        context_TH = module.context(torch.cat(list(hidden)).to(module.fc.weight.device))
        starts = [p._length for p in proposers]
        position_T = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        angles = module.rope.angles(position_T.to(context_TH.device), context_TH.dtype)
        for index, layer in enumerate(module.layers):
            k_T, v_T = layer.self_attn.keys_values(context_TH, angles)
            for proposer, k, v in zip(proposers, k_T.split(counts), v_T.split(counts), strict=True):
                keys, values = proposer._contexts[index]
                proposer._contexts[index] = torch.cat([keys, k]), torch.cat([values, v])
        for proposer, ids in zip(proposers, next_ids, strict=True):
            proposer._last = ids[-1]

    @classmethod
    @torch.no_grad()
    def propose_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Guess with one block of each sequence; ConfigError for more tokens than a block holds."""
        first = proposers[0]
        block_size = first._module.shape.block_size
        if num_tokens >= block_size:
            raise ConfigError(
                f"{num_tokens} draft tokens asked of a draft with blocks of {block_size}; "
                f"it guesses at most {block_size - 1}"
            )
        if num_tokens == 0:
            return [Proposal(token_ids=())] * len(proposers)
        logits_BKV = first._states(proposers, num_tokens + 1)[:, 1:] @ first._ops.head_VH.T
        if temperature == 0:
            rows: list[list[int]] = logits_BKV.argmax(-1).tolist()
            return [Proposal(token_ids=tuple(row)) for row in rows]
        probs_BKV = (logits_BKV.float() / temperature).softmax(-1)
        uniform_BK = uniform_numbers(generators, num_tokens)
        drawn: list[list[int]] = (
            draw(probs_BKV.flatten(0, 1), uniform_BK.flatten()).unflatten(0, uniform_BK.shape).tolist()
        )
        return [
            Proposal(token_ids=tuple(row), probs_KV=probs_KV)
            for row, probs_KV in zip(drawn, probs_BKV, strict=True)
        ]

    @property
    def _length(self) -> int:
        return len(self._contexts[0][0])

    def _states(self, proposers: Sequence[BlockProposer], num_slots: int) -> Tensor:
        """Return [sequences, slots, H]: inputs of the head for one block after each context.

        The contexts lie one after the other, as documents of a batch in training.
        """
        module, device = self._module, self._module.fc.weight.device
        lengths = torch.tensor([p._length for p in proposers])
        stop_A = lengths.cumsum(0)
        layout = BlockLayout(stop_A, stop_A - lengths, device)
        last_A = torch.tensor([p._last for p in proposers], device=device)
        x_ABH = module.embed(last_A, num_slots, self._ops)
        geometry = module.geometry(layout, num_slots, self._empty.to(device), x_ABH.dtype)
        for index, layer in enumerate(module.layers):
            keys, values = zip(*(p._contexts[index] for p in proposers), strict=True)
            x_ABH = layer.advance(x_ABH, (torch.cat(keys), torch.cat(values)), geometry)
        return module.norm(x_ABH)
