"""Reference drafting: a chain of guesses, with a key-value cache over the known positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_core import Proposal, Proposer
from spec_core.drafting import rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator, Tensor

    from spec_core import VocabularyOps
    from spec_draft_eagle3.model import Eagle3Model


class ChainProposer(Proposer):
    """A chain of guesses, each from the one before.

    Row t of the cache is step 0 of the training-time test at position t: the target's state there, with the token
    that follows. Guess s + 1 continues from the last row as step s does.
    """

    def __init__(self, module: Eagle3Model, ops: VocabularyOps) -> None:
        """Start with an empty cache."""
        self._module, self._ops = module, ops
        shape, self._length = module.shape, 0
        empty = module.fc.weight.new_zeros(0, shape.num_kv_heads, shape.head_dim)
        self._keys, self._values = empty, empty
        self._token_weight, self._hidden_weight = (
            weight.detach() for weight in module.midlayer.qkv_weights()
        )
        self._last = module.fc.weight.new_zeros(1, shape.hidden_size)

    @torch.no_grad()
    def extend(self, next_ids: Sequence[int], hidden_TNH: Tensor) -> None:
        """Cache keys and values of T more positions.

        ``hidden_TNH`` may hold all captured layers: the last, the input of the final norm, is not used.
        """
        device = self._module.fc.weight.device
        hidden = self._module.fuse(hidden_TNH[:, :-1].to(device))
        ids = torch.tensor(next_ids, dtype=torch.int64, device=device)
        q, keys, values = self._qkv(ids, hidden, self._length)
        self._keys, self._values = torch.cat([self._keys, keys]), torch.cat([self._values, values])
        self._length += len(next_ids)
        self._last = self._finish(hidden[-1:], q[-1:], self._keys, self._values)

    @torch.no_grad()
    def propose(self, num_tokens: int, temperature: float, generator: Generator) -> Proposal:
        """Guess one token after the other, without keeping their keys and values."""
        ids: list[int] = []
        probs: list[Tensor] = []
        keys, values = self._keys, self._values
        hidden, normed = self._module.output(self._last)
        for step in range(1, num_tokens + 1):
            token, probs_V = self._guess(normed, temperature, generator)
            ids.append(token)
            probs.append(probs_V)
            if step == num_tokens:
                break
            next_id = torch.tensor([token], device=hidden.device)
            q, key, value = self._qkv(next_id, hidden, self._length - 1 + step)
            keys, values = torch.cat([keys, key]), torch.cat([values, value])
            hidden, normed = self._module.output(self._finish(hidden, q, keys, values))
        return Proposal(token_ids=tuple(ids), probs_KV=torch.stack(probs) if temperature > 0 else None)

    def _qkv(self, ids_T: Tensor, hidden_TH: Tensor, first_position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated q and k, and v, of tokens at consecutive positions."""
        layer = self._module.midlayer
        embedded = layer.embed(self._ops.embed(ids_T), self._token_weight)
        q, k, v = layer.qkv(embedded, hidden_TH, self._hidden_weight)
        position_T = torch.arange(first_position, first_position + len(ids_T), device=ids_T.device)
        angles = self._module.rope.angles(position_T, q.dtype)
        return rotate(q, angles), rotate(k, angles), v

    def _finish(self, hidden_1H: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the layer's output for one query that attends every key."""
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (q, keys, values))
        attended = torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True)
        return self._module.midlayer.finish(hidden_1H, attended[0].transpose(0, 1))

    def _guess(self, normed_1H: Tensor, temperature: float, generator: Generator) -> tuple[int, Tensor]:
        """Return a token of the target's vocabulary, and the float32 [V] that it was drawn from."""
        logits = self._module.lm_head(normed_1H)[0].float()
        ids_V = self._module.ids_V
        probs_R = (logits / temperature).softmax(-1) if temperature > 0 else logits
        row = (
            torch.multinomial(probs_R, 1, generator=generator)
            if temperature > 0
            else probs_R.argmax(-1, keepdim=True)
        )
        full = probs_R.new_zeros(self._module.shape.target_vocab_size)
        return int(ids_V[row]), full.index_copy(0, ids_V, probs_R)
