"""Define the P-EAGLE network. Parameters are named as in the serving format.

A segment is a range of a batch's rows that is computed at once (``chains.Segment``). Shapes: R rows of a
segment, C mask tokens of their chains, X = R + C: the rows, followed by the mask tokens; H width, N captured
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from spec_core import VocabularyOps, to_device_async
from spec_core.records import DraftBatch, StepOutput
from spec_draft_peagle.attention import chain_attention, row_attention
from spec_draft_peagle.chains import ChainRule, Chains, Segment
from spec_draft_peagle.config import PEagleConfig
from spec_draft_peagle.kernels import PEagleKernels
from spec_draft_peagle.loss import PEagleLoss
from spec_draft_peagle.shape import PEagleShape
from spec_kit.block_drafting import KeysValues
from spec_kit.chain_drafting import ChainModule, take_rows
from spec_kit.layers import AttentionProjections, Mlp, RmsNorm, Rope, checkpointed, linear

Past = Sequence[Sequence[KeysValues]]
"""Keys and values of the earlier segments, for each layer."""


class PEagleLayer(nn.Module):
    """One Llama-style decoder layer.

    The first layer's attention reads [normed embedding ; normed hidden state].
    """

    def __init__(self, shape: PEagleShape, kernels: PEagleKernels, *, is_first: bool) -> None:
        """Make the layer; its attention and its MLP compute with ``kernels``."""
        super().__init__()
        width = shape.hidden_size
        self.input_layernorm = RmsNorm(width, shape.norm_eps)
        self.hidden_norm = RmsNorm(width, shape.norm_eps) if is_first else None
        self.post_attention_layernorm = RmsNorm(width, shape.norm_eps)
        self.normed_state = (
            nn.Identity()
        )  # hints name this submodule to sum gradients of the attention's input
        self._starts_normed = is_first and shape.norm_before_residual
        self.self_attn = AttentionProjections(shape, 2 * width if is_first else width)
        self.mlp = Mlp(width, shape.intermediate_size, kernels.swiglu_mlp)
        self._head_dim = shape.head_dim
        self._kernels = kernels

    def forward(
        self,
        states: tuple[Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
        segment: Segment,
        past: Sequence[KeysValues],
        asking: Tensor | None = None,
        *,
        recompute: bool = False,
    ) -> tuple[Tensor, KeysValues]:
        """Return the segment's states [X, H] after the layer, and the keys and values of its rows.

        ``states``: hidden states and embeddings, as for ``qkv``. ``asking``: int64, the rows and mask tokens whose
        states are returned; None means all. ``recompute``: whether to compute activations again in the backward
        pass.
        """
        compute = checkpointed(self._compute, enabled=recompute)
        keys, values = ([one[part] for one in past] for part in range(2))
        hidden_XH, *own = compute(segment, asking, *states, *angles, *keys, *values)
        return hidden_XH, (own[0], own[1])

    def _compute(
        self,
        segment: Segment,
        asking: Tensor | None,
        hidden_XH: Tensor,
        embedded_XH: Tensor,
        cos: Tensor,
        sin: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return states, keys and values. ``past``: keys of earlier segments, then their values."""
        rows = segment.stop - segment.first
        earlier = len(past) // 2
        hidden_XH = self.start(hidden_XH)
        masks = len(cos) - rows
        q, *keys_values = self.qkv((hidden_XH, embedded_XH), (cos, sin), asking)
        row_q, mask_q = q.split([len(q) - masks, masks])
        (k, mask_k), (v, mask_v) = (tensor.split([rows, masks]) for tensor in keys_values)
        known = torch.cat([*past[:earlier], k]), torch.cat([*past[earlier:], v])
        row_N = None if asking is None else asking[: len(row_q)]
        attended = torch.cat(
            [
                row_attention(self._kernels, row_q, known, segment, row_N),
                chain_attention(self._kernels, (mask_q, mask_k, mask_v), known, segment),
            ]
        )
        hidden_XH = _repeat_last(hidden_XH, len(cos)) if asking is None else take_rows(hidden_XH, asking)
        return self.finish(hidden_XH, attended), k, v

    def start(self, hidden_XH: Tensor) -> Tensor:
        """Return the states from which the residual connection starts; ``qkv`` and ``finish`` take these."""
        return self.hidden_norm(hidden_XH) if self.hidden_norm and self._starts_normed else hidden_XH

    def qkv(
        self, states: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], asking: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [X, heads, D] with rotary embeddings.

        ``states``: hidden states [X, H], and embeddings [X, H], which only the first layer uses. Equal states at
        the end may be given once; then they are projected once. ``asking``: int64, the rows and mask tokens that
        have a query; None means all.
        """
        hidden_XH, embedded_XH = states
        if self.hidden_norm is None:
            normed = self.input_layernorm(hidden_XH)
        else:
            state_XH = self.normed_state(hidden_XH if self._starts_normed else self.hidden_norm(hidden_XH))
            normed = torch.cat([self.input_layernorm(embedded_XH), state_XH], dim=-1)
        attention = self.self_attn
        asked = normed
        query_angles = angles
        if asking is not None:
            asked = take_rows(normed, asking)
            query_angles = (angles[0][asking], angles[1][asking])
        projections = (attention.q_proj, asked), (attention.k_proj, normed), (attention.v_proj, normed)
        counts = len(query_angles[0]), len(angles[0]), len(angles[0])
        q, k, v = (
            _repeat_last(project(rows), count).unflatten(-1, (-1, self._head_dim))
            for (project, rows), count in zip(projections, counts, strict=True)
        )
        return self._kernels.rotate(q, query_angles), self._kernels.rotate(k, angles), v

    def finish(self, hidden_XH: Tensor, attended: Tensor) -> Tensor:
        """Apply output projection and MLP, each with its residual connection, and return the output."""
        hidden_XH = hidden_XH + self.self_attn.o_proj(attended.flatten(1))
        return hidden_XH + self.mlp(self.post_attention_layernorm(hidden_XH))


def _repeat_last(rows: Tensor, count: int) -> Tensor:
    """Return ``count`` rows: ``rows``, with the last row as often as needed, maybe never."""
    if len(rows) == count:
        return rows
    return torch.cat([rows[:-1], rows[-1:].expand(count - len(rows) + 1, *rows.shape[1:])])


class PEagleModel(ChainModule):
    """The single-device module of the draft; see ``spec_core.draft`` for the contract of ``forward``."""

    shape: PEagleShape
    config: PEagleConfig
    kernels: PEagleKernels

    def __init__(self, shape: PEagleShape, config: PEagleConfig, kernels: PEagleKernels) -> None:
        """Make the network; see ``ChainModule`` for its head."""
        super().__init__()
        self.shape = shape
        self.config = config
        self.kernels = kernels
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)
        width = shape.hidden_size
        inputs = shape.num_captured * width
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, inputs))
        self.input_norm = (RmsNorm if shape.norm_before_fc else nn.Identity)(inputs, eps=shape.norm_eps)
        self.fc = linear(inputs, width)
        self.layers = nn.ModuleList(
            PEagleLayer(shape, kernels, is_first=index == 0) for index in range(shape.num_layers)
        )
        self.norm = RmsNorm(width, shape.norm_eps)
        self.add_head(shape)

    def forward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps) -> StepOutput:
        """Return loss and metrics of the batch's guesses that count in the loss.

        ``denominators``: see ``PEagleDraft.denominators``.
        """
        config = self.config
        rule = ChainRule(
            num_guesses=config.num_guesses,
            retention=config.retention,
            least_retention=config.least_retention,
        )
        chains = Chains.of(batch, rule)
        loss = PEagleLoss(**self.head_parts(ops))
        states_EH = self.states(batch, chains, ops)
        guesses_3E = chains.guesses(config.segment_tokens)  # on the CPU, while a device computes the states
        return loss(states_EH, batch, guesses_3E, denominators)

    def states(self, batch: DraftBatch, chains: Chains, ops: VocabularyOps) -> Tensor:
        """Return the head's inputs [E, H] for the guesses that count in the loss.

        If there are several segments, each segment is computed again in the backward pass. Only the returned
        states, and the keys and values of rows, to which later segments attend, stay in memory.
        """
        device = batch.input_ids_T.device
        pieces = list[torch.Tensor]()
        segments = list(chains.segments(self.config.segment_tokens))
        past: list[list[KeysValues]] = [[] for _ in range(len(self.layers))]
        for segment in segments:
            rows = slice(segment.first, segment.stop)
            token_R = to_device_async(chains.token_R[rows], device)
            inputs = batch.input_ids_T[token_R + 1], batch.hidden_TNH[token_R, :-1]
            counted_R = (chains.count_R[rows] > 0).nonzero().squeeze(1)
            mask_X = torch.arange(int(segment.count_A.sum())) + segment.stop - segment.first
            asking = to_device_async(torch.cat([counted_R, mask_X]), device)
            advance = checkpointed(self.advance, enabled=len(segments) > 1)
            normed, own = advance(segment, inputs, [list(layer) for layer in past], asking, ops)
            for layer, (keys, values) in zip(past, own, strict=True):
                layer.append((keys.clone(), values.clone()))  # a view would keep the mask tokens' values
            pieces.append(normed)
        return torch.cat(pieces)

    def advance(
        self,
        segment: Segment,
        inputs: tuple[Tensor, Tensor],
        past: Past,
        asking: Tensor,
        ops: VocabularyOps,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Return states after the final norm, and each layer's keys and values of the segment's rows.

        ``inputs``: for each row, the next token's id, int64 [R], and the captured states [R, N, H]. ``asking``:
        int64, the rows and mask tokens whose states are returned; the last layer computes no others.
        """
        next_R, hidden_RNH = inputs
        mask_1 = next_R.new_full((1,), self.shape.mask_token_id)
        # All mask tokens are equal before the first attention.
        embedded = ops.embed(torch.cat([next_R, mask_1]))
        hidden = torch.cat([self.fuse(hidden_RNH), self.mask_states(1)])
        angles = self.rope.angles(to_device_async(segment.position, next_R.device), hidden.dtype)
        kept: list[KeysValues] = []
        for layer, known in zip(self.decoder_layers, past, strict=True):
            narrows = layer is self.decoder_layers[-1] and len(kept) > 0
            states = (hidden, embedded)
            recompute = self.config.checkpoint_activations
            hidden, own = layer(
                states, angles, segment, known, asking if narrows else None, recompute=recompute
            )
            kept.append(own)
        if len(kept) == 1:
            hidden = take_rows(hidden, asking)
        return self.norm(hidden), kept

    def fuse(self, hidden_RNH: Tensor) -> Tensor:
        """Return the rows' hidden states for the first layer, [R, H], from the captured states."""
        return self.fc(self.input_norm(hidden_RNH.to(self.fc.weight.dtype).flatten(1)))

    def mask_states(self, num_masks: int) -> Tensor:
        """Return the mask tokens' hidden states for the first layer, [C, H]; all rows are equal."""
        hidden_1X = self.input_norm(self.mask_hidden.squeeze(0).to(self.fc.weight.dtype))
        return self.fc(hidden_1X).expand(num_masks, -1)

    @property
    def decoder_layers(self) -> list[PEagleLayer]:
        """The decoder layers, from first to last."""
        return [cast("PEagleLayer", layer) for layer in self.layers]
