"""Reference drafting: one block per round, with the context's keys and values cached per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_core import Proposal, Proposer
from spec_core.errors import ConfigError
from spec_draft_dflash.attention import BlockLayout

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

    @torch.no_grad()
    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Cache keys and values of T more positions; the last of ``next_ids`` begins the next block."""
        module, start = self._module, len(self._contexts[0][0])
        context_TH = module.context(hidden_TNH.to(module.fc.weight.device))
        position_T = torch.arange(start, start + len(next_ids), device=context_TH.device)
        angles = module.rope.angles(position_T, context_TH.dtype)
        for index, layer in enumerate(module.layers):
            (keys, values), (k, v) = self._contexts[index], layer.self_attn.keys_values(context_TH, angles)
            self._contexts[index] = torch.cat([keys, k]), torch.cat([values, v])
        self._last = next_ids[-1]

    @torch.no_grad()
    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Guess with one block; ConfigError for more tokens than a block holds."""
        block_size = self._module.shape.block_size
        if num_tokens >= block_size:
            raise ConfigError(
                f"{num_tokens} draft tokens asked of a draft with blocks of {block_size}; "
                f"it guesses at most {block_size - 1}"
            )
        if num_tokens == 0:
            return Proposal(token_ids=())
        logits_KV = self._states(num_tokens + 1)[1:] @ self._ops.head_VH.T
        if temperature == 0:
            return Proposal(token_ids=tuple(logits_KV.argmax(-1).tolist()))
        probs_KV = (logits_KV.float() / temperature).softmax(-1)
        drawn = torch.multinomial(probs_KV, 1, generator=generator).squeeze(1)
        return Proposal(token_ids=tuple(drawn.tolist()), probs_KV=probs_KV)

    def _states(self, num_slots: int) -> Tensor:
        """Return [slots, H]: inputs of the head for one block after the context."""
        module, length = self._module, len(self._contexts[0][0])
        device = module.fc.weight.device
        layout = BlockLayout(torch.tensor([length]), torch.tensor([0]), device)
        x_1BH = module.embed(torch.tensor([self._last], device=device), num_slots, self._ops)
        geometry = module.geometry(layout, num_slots, self._empty.to(device), x_1BH.dtype)
        for layer, context in zip(module.layers, self._contexts, strict=True):
            x_1BH = layer.advance(x_1BH, context, geometry)
        return module.norm(x_1BH)[0]
