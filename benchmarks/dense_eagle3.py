"""Eagle3's training step as one would first write it down, which ``trainer_step`` compares the real one with.

Explicit masks over all S · T keys, the logits of every token for target and draft, gradients by autograd alone.
No metrics, so it does a little less than the real step.

Shapes: B sequences of T tokens, N layers captured for the draft and the final norm's input, H, V, V' as usual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core import TargetSpec, TargetTensors


@dataclass(frozen=True, kw_only=True)
class DenseEagle3:
    """The dense step. ``weights`` have the names of the served draft; float32, on the CPU."""

    weights: dict[str, Tensor]
    ids_V: Tensor
    target: TargetSpec
    tensors: TargetTensors
    num_steps: int
    step_decay: float

    def loss(self, ids_BT: Tensor, hidden_BTNH: Tensor, mask_BT: Tensor) -> Tensor:
        """Return Σ_s decay^s · mean CE over the labelled rows of step s; rows whose best token is not kept add 0."""
        target_p_BTV, trained_BT = self._teacher(hidden_BTNH[:, :, -1])
        total = torch.zeros(())
        for s, state_BTH in enumerate(self._states(ids_BT, hidden_BTNH[:, :, :-1])):
            log_q_BTV = (state_BTH @ self.weights["lm_head.weight"].T).log_softmax(-1)
            rows = ids_BT.shape[1] - 2 - s  # row t: teacher at t + 1 + s, label at t + 2 + s
            cross_BT = -(target_p_BTV[:, 1 + s : -1] * log_q_BTV[:, :rows]).sum(-1)
            labelled_BT = mask_BT[:, 2 + s :]
            numerator = (cross_BT * (labelled_BT & trained_BT[:, 1 + s : -1])).sum()
            total = total + self.step_decay**s * numerator / labelled_BT.sum().clamp(min=1)
        return total

    @torch.no_grad()
    def _teacher(self, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's probabilities of kept tokens [B, T, V'], and whether its best token is kept [B, T]."""
        normed = self._rms(hidden_BTH, self.tensors.norm_H)
        logits_BTV = normed @ self.tensors.head_VH.T
        trained_BT = torch.isin(logits_BTV.argmax(-1), self.ids_V)
        return logits_BTV[..., self.ids_V].softmax(-1), trained_BT

    def _states(self, ids_BT: Tensor, hidden_BTNH: Tensor) -> list[Tensor]:
        """Return the head's inputs of each step."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states: list[Tensor] = []
        u = hidden_BTNH.flatten(2) @ self.weights["fc.weight"].T
        embedding_BTH = F.embedding(F.pad(ids_BT, (0, self.num_steps)), self.tensors.embedding_VH)
        for step in range(self.num_steps):
            token = embedding_BTH[:, step + 1 : step + 1 + ids_BT.shape[1]]
            u = self._layer(token, u, keys, values)
            states.append(self._rms(u, self.weights["norm.weight"]))
        return states

    def _layer(self, token: Tensor, u: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        layer = {
            name.removeprefix("midlayer."): weight
            for name, weight in self.weights.items()
            if name.startswith("midlayer.")
        }
        normed = [
            self._rms(token, layer["input_layernorm.weight"]),
            self._rms(u, layer["hidden_norm.weight"]),
        ]
        x, target = torch.cat(normed, -1), self.target
        q = _heads(x @ layer["self_attn.q_proj.weight"].T, target.num_heads)
        k = _heads(x @ layer["self_attn.k_proj.weight"].T, target.num_kv_heads)
        v = _heads(x @ layer["self_attn.v_proj.weight"].T, target.num_kv_heads)
        group, step = target.num_heads // target.num_kv_heads, len(keys)
        keys.append(self._rotate(k, step).repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
        attended = _attend(self._rotate(q, step), torch.cat(keys, 2), torch.cat(values, 2))
        u = u + attended.transpose(1, 2).flatten(2) @ layer["self_attn.o_proj.weight"].T
        y = self._rms(u, layer["post_attention_layernorm.weight"])
        gate = F.silu(y @ layer["mlp.gate_proj.weight"].T)
        return u + (gate * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T

    def _rotate(self, heads: Tensor, step: int) -> Tensor:
        """Apply the rotary embedding to [B, heads, T, D]: token t of step s stands at position t + s."""
        _, _, num_tokens, dim = heads.shape
        frequency = 1 / self.target.rope["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
        angle = ((torch.arange(num_tokens) + step)[:, None] * frequency).repeat(1, 2)
        first, second = heads.chunk(2, -1)
        return heads * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.target.norm_eps) * weight


def _heads(projected: Tensor, num_heads: int) -> Tensor:
    """Turn [B, T, heads · D] into [B, heads, T, D]."""
    return projected.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from query t to step 0's keys up to t and, of every later step, to its own."""
    num_tokens = q.shape[2]
    own = [torch.eye(num_tokens, dtype=torch.bool)] * (keys.shape[2] // num_tokens - 1)
    mask = torch.cat([torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(), *own], 1)
    scores = q @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values
