"""Define the Eagle3 network, and its training over unrolled draft steps ("training-time test").

Parameters are named as in the serving format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spec_core import VocabularyOps
from spec_core.records import DraftBatch, StepOutput
from spec_draft_eagle3.attention import GroupedQueryAttention
from spec_draft_eagle3.config import Eagle3Config
from spec_draft_eagle3.shape import Eagle3Shape
from spec_kit.chain_drafting import (
    ChainKernels,
    ChainModule,
    HeadLoss,
    InputTokens,
    NeededRows,
    Places,
    SupervisedRows,
    UnrolledAttention,
    judged_weights,
    step_weights,
    take_rows,
)
from spec_kit.layers import ContextRows, LatentAttention, Mlp, RmsNorm, Rope, checkpointed, linear

Angles = tuple[Tensor, Tensor]
Bounds = list[tuple[int, int]]


ATTENTIONS: Mapping[str, Any] = {"gqa": GroupedQueryAttention, "mla": LatentAttention}
"""Value of ``draft.attention`` -> attention module."""


class Eagle3Layer(nn.Module):
    """One decoder layer. The first layer's attention reads [normed token embedding ; normed hidden state].

    The layer has the attention's projections; ``_UnrolledLayer`` computes the attention over the unrolled
    steps.
    """

    def __init__(self, shape: Eagle3Shape, kernels: ChainKernels, *, is_first: bool) -> None:
        """Create the layer; it computes with the kernels in ``kernels``."""
        super().__init__()
        width = shape.hidden_size
        self.input_layernorm = RmsNorm(width, shape.norm_eps)
        self.hidden_norm = RmsNorm(width, shape.norm_eps) if is_first else None
        self.post_attention_layernorm = RmsNorm(width, shape.norm_eps)
        # A submodule, so that hints can name it: gradients of the attention's input are summed there.
        self.normed_state = nn.Identity()
        self._starts_normed = is_first and shape.norm_before_residual
        self.self_attn = ATTENTIONS[shape.attention](shape, 2 * width if is_first else width)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size, kernels.swiglu_mlp)
        self._linear = kernels.added_linear

    def qkv_weight(self) -> Tensor:
        """Return the weights of the attention's input projections, stacked along the rows."""
        return torch.cat([projection.weight for projection in self.self_attn.input_projections])

    def start(self, hidden_TH: Tensor) -> Tensor:
        """Return the state from which the residual connection starts. The other methods take this state."""
        return self._norm(hidden_TH) if self._starts_normed else hidden_TH

    def normed(self, hidden_TH: Tensor) -> Tensor:
        """Return the state that the attention reads."""
        return self.normed_state(hidden_TH if self._starts_normed else self._norm(hidden_TH))

    def _norm(self, hidden_TH: Tensor) -> Tensor:
        return (self.input_layernorm if self.hidden_norm is None else self.hidden_norm)(hidden_TH)

    def embed(self, embedding_TH: Tensor, weight: Tensor) -> Tensor:
        """Return the token embedding's summand of the input projections, [T, rows of ``weight``]."""
        return self._linear(self.input_layernorm(embedding_TH), weight)

    def project(
        self, hidden_TH: Tensor, weight: Tensor, embedded: Tensor | None = None, row_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the input projections for queries [N, channels], and for keys and values [T, channels].

        ``row_N``: indices of the rows that have a query; None means all rows. ``embedded``: the result of
        ``embed``, only for the first layer.
        """
        normed_TH = self.normed(hidden_TH)
        width = len(self.self_attn.input_projections[0].weight)
        if row_N is None:
            projected = self._linear(normed_TH, weight, embedded)
            queries, keys_values = projected.split([width, len(weight) - width], dim=1)
            return queries, keys_values
        added = (None, None) if embedded is None else (embedded[:, :width], embedded[:, width:])
        added_NQ = None if added[0] is None else take_rows(added[0], row_N)
        queries = self._linear(take_rows(normed_TH, row_N), weight[:width], added_NQ)
        return queries, self._linear(normed_TH, weight[width:], added[1])

    def finish(self, hidden_TH: Tensor, attended: Tensor) -> Tensor:
        """Apply output projection and MLP, each with its residual connection, and return the output."""
        hidden_TH = hidden_TH + self.self_attn.output(attended)
        return hidden_TH + self.mlp(self.post_attention_layernorm(hidden_TH))


@dataclass(frozen=True)
class _Rows:
    """The rows that one layer computes in one step."""

    query_angles: Angles
    angles: Angles
    """Rotary angles of the keys."""
    index_N: Tensor | None
    """int64: row of each query in the flat batch; None means that every row has a query."""
    token_N: Tensor | slice
    """Index of each row's input token among the embedded tokens."""
    own: ContextRows
    """The rows that this rank computes in step 0."""
    local_N: Tensor | None
    """int64: index of each query's row among the rows of ``own``; None means that each row of ``own`` has a
    query."""
    step: int
    """Number of the unrolled step; step 0 computes keys and values of every row."""


class _UnrolledLayer:
    """Runs one layer for each unrolled step."""

    def __init__(self, model: Eagle3Model, layer: Eagle3Layer, weight: Tensor, bounds: Bounds) -> None:
        """Start before the first step.

        ``weight``: the stacked weights of the input projections of the hidden state. ``bounds``: first row of
        each document, and the row after its last row.
        """
        self._model = model
        self._layer = layer
        self._weight = weight
        self._attention = UnrolledAttention(
            model.kernels, bounds, model.config.num_steps, model.shape.sliding_window
        )

    def step(self, hidden_RH: Tensor, embedded: Tensor | None, rows: _Rows) -> Tensor:
        """Return the layer's output of the next step, [N, H]: one row for each query.

        ``embedded``: the result of ``Eagle3Layer.embed`` for all tokens; None for later layers.
        """
        # A local function: as an attribute it would make a cycle, whose tensors are freed late.
        advance = checkpointed(self._compute, enabled=self._model.config.checkpoint_activations)
        hidden_NH, k, v = advance(rows, hidden_RH, embedded, *self._attention.past)
        self._attention.keep(k, v)
        return hidden_NH

    def _compute(
        self, rows: _Rows, hidden_RH: Tensor, embedded: Tensor | None, *past: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the step's output, keys and values. ``past``: see ``UnrolledAttention``."""
        layer = self._layer
        attention = layer.self_attn
        rotate = self._model.kernels.rotate
        if embedded is not None:
            index = rows.token_N
            embedded = embedded[index] if isinstance(index, slice) else take_rows(embedded, index)
        local_N = rows.local_N if rows.step == 0 else None
        hidden_RH = layer.start(hidden_RH)
        projected = layer.project(hidden_RH, self._weight, embedded, local_N)
        if local_N is not None:
            hidden_RH = self._model.select(hidden_RH, local_N)
        q = attention.queries(projected[0], lambda heads: rotate(heads, rows.query_angles))
        k, v = attention.keys_values(projected[1], lambda heads: rotate(heads, rows.angles))
        if self._model.config.checkpoint_activations:
            v = v.contiguous()  # a view would keep the whole product in memory
        if rows.step == 0:
            k, v = rows.own.gather(k, v)
        places = Places(rows.index_N, rows.own, rows.local_N)
        attended = self._attention.attend(rows.step, (q, k, v), past, places)
        return layer.finish(hidden_RH, attended), k, v


class Eagle3Model(ChainModule):
    """The single-device module of the draft; see ``spec_core.draft`` for the contract of ``forward``."""

    shape: Eagle3Shape
    config: Eagle3Config
    kernels: ChainKernels

    def __init__(
        self,
        shape: Eagle3Shape,
        config: Eagle3Config,
        kernels: ChainKernels,
        merged_token_id: int | None = None,
    ) -> None:
        """Create the network; see ``ChainModule`` for its head.

        ``merged_token_id``: an image's placeholder token, if the draft reads the target's embeddings of
        images, which are then the first captured state.
        """
        super().__init__()
        self.shape = shape
        self.config = config
        self.kernels = kernels
        self.merged_token_id = merged_token_id
        self.fused = slice(0 if merged_token_id is None else 1, -1)
        """Captured states that ``fuse`` combines. The last captured state is for the teacher."""
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)
        width = shape.hidden_size
        self.fc = linear(shape.num_captured * width, width)
        joined = RmsNorm if shape.norm_before_fc else nn.Identity
        self.input_norm = joined(shape.num_captured * width, eps=shape.norm_eps)
        chunks = shape.num_captured if shape.fc_norm else 0
        self.fc_norm = nn.ModuleList(RmsNorm(width, shape.norm_eps) for _ in range(chunks))
        self.midlayer = Eagle3Layer(shape, kernels, is_first=True)
        later = {str(index): Eagle3Layer(shape, kernels, is_first=False) for index in shape.later_layers}
        self.layers = nn.ModuleDict(later)
        self.norm = RmsNorm(width, shape.norm_eps)
        # Places that a strategy can name: there it gathers the tokens, or divides them among ranks.
        self.head_input, self.whole_rows, self.rank_rows = nn.Identity(), nn.Identity(), nn.Identity()
        self.add_head(shape)

    @property
    def decoder_layers(self) -> list[Eagle3Layer]:
        """The layers, first to last."""
        return [self.midlayer, *(self.layers[str(index)] for index in self.shape.later_layers)]  # pyright: ignore[reportReturnType]

    def forward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps) -> StepOutput:
        """Return this batch's summand of the loss Σ_s decay^s · (Σ CE) / n_s, where s is the unrolled step.

        Σ CE: sum of the cross-entropies (or ``config.loss``) of all labels of step s. ``denominators``: n_s,
        the number of these labels in the global batch, float64 [S]. ``judged_weights`` has the weights of ``opd``.
        """
        states, needed = self.unroll(batch, ops)
        loss = HeadLoss(**self.head_parts(ops))
        if self.config.opd and not batch.evaluates:
            weight_WS = judged_weights(denominators, self.config.step_decay, states[0])
        else:  # in an evaluation no guess has been judged: all labels are counted as accepted
            weight_WS = step_weights(denominators[: len(states)], self.config.step_decay, states[0])
        return loss(states, batch.hidden_TNH[:, -1], SupervisedRows.of(batch, needed), weight_WS, needed)

    def unroll(self, batch: DraftBatch, ops: VocabularyOps) -> tuple[list[Tensor], NeededRows]:
        """Return the head's normed input of each of S steps, [N, H], and the N rows that each step needs.

        The input token of row t in step s is token t + 1 + s. If that is after the end of the row's document,
        the token is arbitrary: the row has no label in this step or a later one, and no row of its document
        attends to it.
        """
        steps = self.config.num_steps
        layers = self.decoder_layers
        own = ContextRows.of(batch)
        inputs = InputTokens.of(batch, own, steps)
        # The embedding's part of q, k and v does not depend on the step, so every step shares one product.
        token_weight, hidden_weight = self.midlayer.qkv_weight().chunk(2, dim=1)
        weights = [hidden_weight, *(layer.qkv_weight() for layer in layers[1:])]
        embedded_UH = ops.embed(inputs.ids_U)
        if self.merged_token_id is not None:
            embedded_UH = self.merged(embedded_UH, inputs.ids_U, inputs.take(batch.hidden_TNH[:, 0]))
        tokens = inputs.padded(self.midlayer.embed(embedded_UH, token_weight))
        bounds = [(span.start, span.stop) for span in batch.spans]
        unrolled = [_UnrolledLayer(self, *each, bounds) for each in zip(layers, weights, strict=True)]
        hidden = self.fuse(own.take(batch.hidden_TNH)[:, self.fused])
        needed = NeededRows.of(batch, steps, own)  # on the CPU, while a device computes the lines above
        angles_of = self.rope.angles_of_steps(needed.take(batch.position_T), steps, hidden.dtype)
        states: list[Tensor] = []
        for step in range(steps):
            row_N, local_N = needed.of_step(step)
            cos_N, sin_N = (part[: needed.counts[step]] for part in angles_of[step])
            angles_N = angles = cos_N, sin_N
            if step == 0 and not needed.are_all:
                angles = self.rope.angles(own.take(batch.position_T), hidden.dtype)
            elif row_N is not None:
                hidden = self.select(hidden, slice(len(row_N)))
            token_N = inputs.indices(row_N, step) if step > 0 else inputs.first
            for layer, over_steps in zip(layers, unrolled, strict=True):
                # Every row of step 0 is read, as keys and values and by the next layer.
                narrows = step == 0 and layer is layers[-1]
                rows = _Rows(
                    query_angles=angles_N if narrows else angles,
                    angles=angles,
                    index_N=row_N if step > 0 or narrows else own.index,
                    token_N=token_N,
                    own=own,
                    local_N=local_N if step > 0 or narrows else None,
                    step=step,
                )
                hidden = over_steps.step(hidden, tokens if layer is self.midlayer else None, rows)
            hidden, normed = self.output(hidden)
            states.append(self.head_input(normed))
        return states, needed

    def merged(self, embedded_TH: Tensor, ids_T: Tensor, state_TH: Tensor) -> Tensor:
        """Return the tokens' embeddings, in which placeholder tokens of images have ``state_TH``.

        ``state_TH``: the input of the target's first layer.
        """
        is_image_T = ids_T == self.merged_token_id
        return torch.where(is_image_T[:, None], state_TH.to(embedded_TH.dtype), embedded_TH)

    def select(self, hidden_RH: Tensor, rows: Tensor | slice) -> Tensor:
        """Return the given rows of a hidden state. Input and output may be one rank's shard."""
        whole_RH = self.whole_rows(hidden_RH)
        return self.rank_rows(whole_RH[rows] if isinstance(rows, slice) else take_rows(whole_RH, rows))

    def fuse(self, hidden_TNH: Tensor) -> Tensor:
        """Return the first step's hidden state [T, H] from captured states [T, N, H]."""
        hidden_TX = self.input_norm(hidden_TNH.to(self.fc.weight.dtype).flatten(1))
        if self.fc_norm:
            chunks = hidden_TX.unflatten(1, (len(self.fc_norm), -1)).unbind(1)
            hidden_TX = torch.cat(
                [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=1
            )
        return self.fc(hidden_TX)

    def output(self, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next step's hidden state and the head's input, both from the last layer's output."""
        normed = self.norm(hidden_TH)
        return (normed if self.shape.norm_output else hidden_TH), normed
