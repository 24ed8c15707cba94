"""Define the MTP network and its unrolled steps. Parameter names are the target's own tensor names.

Shapes: T tokens, H width, N heads, D channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spec_core import VocabularyOps
from spec_core.records import DraftBatch, StepOutput
from spec_draft_mtp.config import MtpConfig
from spec_draft_mtp.layer import MtpHead, wide_rms_norm
from spec_draft_mtp.shape import MtpShape
from spec_kit.chain_drafting import (
    ChainKernels,
    HeadLoss,
    InputTokens,
    NeededRows,
    Places,
    SupervisedRows,
    UnrolledAttention,
    step_weights,
    take_rows,
)
from spec_kit.layers import INIT_STD, ContextRows, Rope, checkpointed

MATRIX_GAIN = 0.5
"""Standard deviation of a matrix's initial weights, multiplied by the root of its number of inputs. The scale
of the matrix's output then does not depend on its width."""


class TargetNorm(nn.Module):
    """The target's final norm; it is neither trained nor exported."""

    weight: Tensor

    def __init__(self, weight_H: Tensor, shift: float, eps: float) -> None:
        """Store the target's weight unchanged; the norm multiplies by weight + ``shift``."""
        super().__init__()
        self.register_buffer("weight", weight_H.float(), persistent=False)
        self._shift = shift
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed state, shaped like ``x`` [..., H]."""
        return wide_rms_norm(x, self.weight, self._shift, self._eps)


@dataclass(frozen=True)
class _Rows:
    """The rows that one step computes."""

    index_N: Tensor | None
    """int64: row of each query in the flat batch; None means that every row has a query."""
    token_K: Tensor | slice
    """Index of each row's input token among the embedded tokens."""
    position_K: Tensor
    angles: tuple[Tensor, Tensor]
    """Rotary angles of each row."""
    own: ContextRows
    """The rows that this rank computes in step 0, all of which have a key."""
    local_N: Tensor | None
    """int64: index of each query's row among the rows of ``own``; None means that each row of ``own`` has a
    query."""
    step: int
    """Number of the unrolled step."""


class MtpModel(nn.Module):
    """The single-device module of the draft; see ``spec_core.draft`` for the contract of ``forward``."""

    def __init__(
        self, shape: MtpShape, config: MtpConfig, target_norm: TargetNorm, kernels: ChainKernels
    ) -> None:
        """Make the network. ``target_norm`` computes the states that engines pass to the head."""
        super().__init__()
        self.shape = shape
        self.config = config
        self.kernels = kernels
        self.rope = Rope(shape.rope, shape.head_dim, shape.max_positions)
        self.mtp = MtpHead(shape, kernels)
        self.target_norm = target_norm

    def forward(self, batch: DraftBatch, denominators: Tensor, ops: VocabularyOps) -> StepOutput:
        """Return this batch's summand of the loss Σ_s decay^s · (Σ CE) / n_s, where s is the unrolled step.

        Σ CE: sum of the cross-entropies (or ``config.loss``) of all labels of step s. ``denominators``: n_s, the
        number of these labels in the global batch, float64 [S].
        """
        states, needed = self.unroll(batch, ops)
        loss = HeadLoss(
            head=ops.head,
            ids_V=torch.arange(*ops.vocab_range, device=batch.input_ids_T.device),
            vocab_mask_V=None,
            kind=self.config.loss,
            ops=ops,
            kernels=self.kernels,
        )
        weight_1S = step_weights(denominators, self.config.step_decay, states[0])
        return loss(states, batch.hidden_TNH[:, -1], SupervisedRows.of(batch, needed), weight_1S, needed)

    def unroll(self, batch: DraftBatch, ops: VocabularyOps) -> tuple[list[Tensor], NeededRows]:
        """Return the target head's input of each of S steps, [N, H], and the N rows that each step needs.

        Each step's output is also the next step's state. The input token of row t in step s is token t + 1 + s. If
        that is after the end of the row's document, the token is arbitrary: the row has no label in this step or a
        later one, and no row of its document attends to it.
        """
        steps = self.config.num_steps
        own = ContextRows.of(batch)
        inputs = InputTokens.of(batch, own, steps)
        embedded = inputs.padded(ops.embed(inputs.ids_U))
        bounds = [(span.start, span.stop) for span in batch.spans]
        states = [self.first_state(own.take(batch.hidden_TNH))]
        attention = UnrolledAttention(self.kernels, bounds, steps)
        needed = NeededRows.of(batch, steps, own)
        position_N = needed.take(batch.position_T)
        angles_of = self.rope.angles_of_steps(position_N, steps, states[0].dtype)
        advance = checkpointed(self._advance, enabled=self.config.checkpoint_activations)
        for step in range(steps):
            row_N, local_N = needed.of_step(step)
            token_K = inputs.indices(row_N, step) if step > 0 else inputs.first
            position_K = position_N[: needed.counts[step]] + step
            angles = angles_of[step]
            if step == 0 and not needed.are_all:
                position_K = own.take(batch.position_T)
                angles = self.rope.angles(position_K, states[0].dtype)
            angles = angles[0][: len(position_K)], angles[1][: len(position_K)]
            rows = _Rows(row_N, token_K, position_K, angles, own, local_N, step)
            state_NH, k, v = advance(rows, attention, embedded, states[-1], *attention.past)
            states.append(state_NH)
            attention.keep(k, v)
        return states[1:], needed

    def _advance(
        self, rows: _Rows, attention: UnrolledAttention, embedded: Tensor, state: Tensor, *past: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a step's output, keys and values. ``past``: see ``UnrolledAttention``."""
        layer = self.mtp.layer
        position_K = rows.position_K
        x_KH = self.mtp.join(embedded[rows.token_K], state[: len(position_K)], position_K)
        q, k, v, *rest = layer.qkv(x_KH, lambda heads: self.kernels.rotate(heads, rows.angles))
        if rows.step == 0:
            k, v = rows.own.gather(k, v)
            if rows.local_N is not None:
                q, x_KH, *rest = (take_rows(part, rows.local_N) for part in (q, x_KH, *rest))
        places = Places(rows.index_N, rows.own, rows.local_N)
        attended = attention.attend(rows.step, (q, k, v), past, places)
        return self.mtp.norm(layer.finish(x_KH, attended, *rest)), k, v

    def first_state(self, hidden_TNH: Tensor) -> Tensor:
        """Return step 0's states [T, H]: the target's states *after* its final norm, which engines also use.

        States before the norm would cause no error, because the head's ``pre_fc_norm_hidden`` hides their
        scale, but guesses would be worse.
        """
        return self.target_norm(hidden_TNH[:, -1].to(self.mtp.fc.weight.dtype))


@torch.no_grad()
def scale_initial_weights(module: MtpModel, norm_H: Tensor) -> None:
    """Scale the module's random matrices, and copy its last norm from the target's weight ``norm_H``."""
    for weight in module.parameters():
        if weight.ndim > 1:
            weight.mul_(MATRIX_GAIN / math.sqrt(weight.shape[-1]) / INIT_STD)
    module.mtp.norm.weight.copy_(norm_H.float() - float(not module.shape.stored_as_layer))
