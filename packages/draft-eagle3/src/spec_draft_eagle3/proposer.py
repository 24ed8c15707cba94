"""Draft with Eagle3 in plain torch, as a reference: guesses are made one after the other.

The KV caches hold the known positions.

Shape suffixes: B sequences, T new positions of all sequences, L cached positions, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from spec_core import Proposal, VocabularyOps
from spec_draft_eagle3.model import Eagle3Layer, Eagle3Model
from spec_kit.drafting import BatchProposer, Guesses
from spec_kit.layers import cached_attention, extended_caches, new_positions, rotate

Angles = tuple[Tensor, Tensor]
KeysValues = tuple[Tensor, Tensor]
"""Keys or values of one sequence in one layer, [L, kv_heads, D]."""


class ChainProposer(BatchProposer):
    """Makes guesses one after the other, each from the previous guess.

    Row t of the KV cache is computed like step 0 of training at position t, from the target's state at t and
    the next token. Guess s + 1 is computed like step s, from the last row.
    """

    def __init__(self, module: Eagle3Model, ops: VocabularyOps) -> None:
        """Start with an empty cache."""
        self._network = _Network(module, ops)
        heads, width = module.shape.cache_shape
        empty = (
            module.fc.weight.new_zeros(0, heads, width),
            module.fc.weight.new_zeros(0, heads, module.shape.value_width),
        )
        self._caches: list[KeysValues] = [empty] * module.shape.num_layers
        self._last = module.fc.weight.new_zeros(module.shape.hidden_size)

    @classmethod
    @torch.no_grad()
    def extend_all(
        cls, proposers: Sequence[Self], next_ids: Sequence[Sequence[int]], hidden: Sequence[Tensor]
    ) -> None:
        """Add keys and values of more positions of every sequence to the caches, in one forward pass.

        ``hidden`` holds all captured layers. The last layer, which is the input of the final norm, is not
        used.
        """
        network = proposers[0]._network
        counts = [len(ids) for ids in next_ids]
        device = network.device
        ids_T = torch.tensor([token for ids in next_ids for token in ids], dtype=torch.int64).to(device)
        hidden_TNH = torch.cat(list(hidden)).to(device)
        ends = (torch.tensor(counts).cumsum(0) - 1).to(device)
        embedded_TH = network.embed_known(ids_T, hidden_TNH, ends)
        hidden_TH = network.module.fuse(hidden_TNH[:, network.module.fused])
        angles = network.angles(new_positions([p._caches[0] for p in proposers], counts))
        for index, layer in enumerate(network.layers):
            hidden_TH = layer.start(hidden_TH)
            q_T, k_T, v_T = network.qkv(layer, embedded_TH, hidden_TH, angles)
            caches = extended_caches([p._caches[index] for p in proposers], k_T, v_T, counts)
            for proposer, cache in zip(proposers, caches, strict=True):
                proposer._caches[index] = cache
            if layer is not network.layers[-1]:
                attended = cached_attention(q_T, caches, counts, network.window)
                hidden_TH = layer.finish(hidden_TH, attended)
        context = _Context([p._caches[-1] for p in proposers], 0, network.window)
        last_BH = network.finish(network.layers[-1], hidden_TH[ends], q_T[ends], context)
        for proposer, last_H in zip(proposers, last_BH, strict=True):
            proposer._last = last_H

    @classmethod
    def guess_all(
        cls, proposers: Sequence[Self], num_tokens: int, temperature: float, generators: Sequence[Generator]
    ) -> list[Proposal]:
        """Guess tokens one after the other, for all sequences at once.

        Keys and values of guesses are not kept in the caches.
        """
        network = proposers[0]._network
        contexts = [
            _Context(caches, num_tokens, network.window)
            for caches in zip(*(p._caches for p in proposers), strict=True)
        ]
        guesses = Guesses(num_tokens, temperature, generators)
        id_B = None
        hidden_BH, normed_BH = network.module.output(torch.stack([p._last for p in proposers]))
        angles = network.angles(contexts[0].guess_position_S)
        step_angles = zip(*(part.split(len(proposers)) for part in angles), strict=True)
        for _ in range(num_tokens):
            if id_B is not None:
                hidden_BH = network.advance(id_B, hidden_BH, next(step_angles), contexts)
                hidden_BH, normed_BH = network.module.output(hidden_BH)
            id_B = guesses.choose(network.module.lm_head(normed_BH).float(), network.module.head_tokens)
        return guesses.proposals()


class _Network:
    """Runs the draft's layers and head on positions of several sequences."""

    def __init__(self, module: Eagle3Model, ops: VocabularyOps) -> None:
        self.module = module
        self._ops = ops
        self.device = module.fc.weight.device
        self.layers = module.decoder_layers
        self.window = module.shape.sliding_window

    def angles(self, position_T: Tensor) -> Angles:
        """Return the rotary angles of positions."""
        return self.module.rope.angles(position_T, self.module.fc.weight.dtype)

    def advance(
        self, ids_B: Tensor, hidden_BH: Tensor, angles: Angles, contexts: Sequence[_Context]
    ) -> Tensor:
        """Return the last layer's output for each sequence's next guess, and extend ``contexts``.

        The keys and values of the guess are added to ``contexts``.
        """
        embedded_BH = self._ops.embed(ids_B)
        for layer, context in zip(self.layers, contexts, strict=True):
            hidden_BH = layer.start(hidden_BH)
            q, k, v = self.qkv(layer, embedded_BH, hidden_BH, angles)
            context.append(k, v)
            hidden_BH = self.finish(layer, hidden_BH, q, context)
        return hidden_BH

    def embed_known(self, ids_T: Tensor, hidden_TNH: Tensor, ends: Tensor) -> Tensor:
        """Return the embeddings [T, H] of tokens. In row t is the token that follows the position of row t.

        ``ends``: each sequence's last row. The target has not run the token of this row yet, so the token
        belongs to no image.
        """
        embedded_TH = self._ops.embed(ids_T)
        if self.module.merged_token_id is None:
            return embedded_TH
        following_TH = hidden_TNH[:, 0].roll(-1, dims=0)
        return self.module.merged(embedded_TH, ids_T.index_fill(0, ends, -1), following_TH)

    def qkv(
        self, layer: Eagle3Layer, embedded_TH: Tensor, hidden_TH: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of tokens. ``angles``: the rotary angles of their positions."""
        inputs = layer.normed(hidden_TH)
        if layer.hidden_norm is not None:
            inputs = torch.cat([layer.input_layernorm(embedded_TH), inputs], dim=-1)
        attention = layer.self_attn
        first, *others = (projection(inputs) for projection in attention.input_projections)

        def turn(heads: Tensor) -> Tensor:
            return rotate(heads, angles)

        return attention.queries(first, turn), *attention.keys_values(torch.cat(others, dim=-1), turn)

    def finish(self, layer: Eagle3Layer, hidden_BH: Tensor, q_BND: Tensor, context: _Context) -> Tensor:
        """Return a layer's output for one query of each sequence, which attends to its window of the context."""
        attended = torch.nn.functional.scaled_dot_product_attention(
            q_BND[:, :, None],
            context.keys,
            context.values,
            attn_mask=context.visible,
            enable_gqa=True,
        )
        return layer.finish(hidden_BH, attended)


class _Context:
    """One layer's keys and values of several sequences, padded to one length, with space for guesses.

    Shape: [B, kv_heads, L, D].
    """

    def __init__(self, caches: Sequence[KeysValues], room: int, window: int | None) -> None:
        device = caches[0][0].device
        self._window = window
        self._lengths = torch.tensor([len(keys) for keys, _ in caches])
        self._used = int(self._lengths.max())
        self._num_guesses = 0
        self._keys, self._values = (
            torch.nn.functional.pad(pad_sequence(parts, batch_first=True).transpose(1, 2), (0, 0, 0, room))
            for parts in ([keys for keys, _ in caches], [values for _, values in caches])
        )
        length_B = self._lengths.to(device)
        self.guess_position_S = (length_B + torch.arange(room, device=device)[:, None]).flatten()
        """Positions of the states that guesses are computed from, ordered by guess and then by sequence. The guess
        itself is one position later."""
        column_L = torch.arange(self._keys.shape[2], device=device)
        self._visible_BL = (column_L < length_B[:, None]) | (column_L >= self._used)
        # The last known position is a sequence's first query; each guess is the next one.
        self._distance_BL = length_B[:, None] - 1 - column_L
        self._distance_BL[:, self._used :] = self._used - 1 - column_L[self._used :]

    def append(self, k_BND: Tensor, v_BND: Tensor) -> None:
        """Add the keys and values of one guess of each sequence."""
        column = self._used + self._num_guesses
        self._keys[:, :, column] = k_BND
        self._values[:, :, column] = v_BND
        self._num_guesses += 1

    @property
    def keys(self) -> Tensor:
        """Keys of the known positions and of the guesses so far."""
        return self._keys[:, :, : self._used + self._num_guesses]

    @property
    def values(self) -> Tensor:
        """Values of the known positions and of the guesses so far."""
        return self._values[:, :, : self._used + self._num_guesses]

    @property
    def visible(self) -> Tensor:
        """Attention mask, bool [B, 1, 1, L]: True for the columns, without padding, that the newest query sees."""
        visible_BL = self._visible_BL
        if self._window is not None:
            visible_BL = visible_BL & (self._distance_BL + self._num_guesses < self._window)
        return visible_BL[:, None, None, : self._used + self._num_guesses]
