"""Parts that the drafts' dense references share, written as plainly as possible from the maths; slow on purpose.

Imports nothing of the project.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Document:
    ids: Tensor  # [T]
    states: Tensor  # [T, n (+ 1), H]: n captured layers (then the input of the target's final norm)
    mask: Tensor  # [T]
    rounds: dict[int, int] | None = None  # on policy: last known token of each round -> accepted guesses
    proposed: int = 0  # guesses of a round
    anchors: list[int] = field(default_factory=list)  # drawn for a draft in blocks
    elements: list[tuple[int, int]] = field(
        default_factory=list
    )  # (row, guess) that count in P-EAGLE's chains


@dataclass(kw_only=True)
class TargetSetting:
    """Everything of the target."""

    embedding: Tensor  # [V, H]
    target_head: Tensor  # [V, H]
    target_norm: Tensor  # [H]
    inv_freq: Tensor  # [rotated / 2]
    rope_scale: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    logit_scale: float = 1.0

    def teacher_logits(self, document: Document) -> Tensor:
        """[T, V]: what the target guesses behind each token."""
        return rms(document.states[:, -1], self.target_norm, self.eps) @ self.target_head.T * self.logit_scale


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor | list[int], setting: TargetSetting) -> Tensor:
    """x [T, heads, head_dim]; the textbook form: x · cos + rotate_half(x) · sin over the rotated channels."""
    angle = torch.as_tensor(positions, dtype=x.dtype)[:, None] * setting.inv_freq.to(x.dtype)
    angle = torch.cat([angle, angle], -1)[:, None]
    rotated = x[..., : angle.shape[-1]]
    half = rotated.shape[-1] // 2
    turned = torch.cat([-rotated[..., half:], rotated[..., :half]], -1)
    mixed = (rotated * angle.cos() + turned * angle.sin()) * setting.rope_scale
    return torch.cat([mixed, x[..., angle.shape[-1] :]], -1)


def weights_of(weights: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """The weights of a layer or another part, by their names inside it."""
    return {name.removeprefix(part): value for name, value in weights.items() if name.startswith(part)}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[T, heads · channels] of q [T, heads, c], k and v [U, groups, c]; ``mask`` [T, U]: which keys a query sees."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,uhd->htu", q, k.repeat_interleave(group, 1)) / q.shape[-1] ** 0.5
    probs = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("htu,uhd->thd", probs, v.repeat_interleave(group, 1)).flatten(1)


def mlp(own: dict[str, Tensor], y: Tensor) -> Tensor:
    gate = torch.nn.functional.silu(y @ own["mlp.gate_proj.weight"].T)
    return (gate * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T


def row_loss(kind: str, logits: Tensor, teacher_logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, α) of one row, whose vocabulary is ``kept``."""
    q, p = logits.softmax(-1), teacher_logits[kept].softmax(-1)
    alpha = torch.minimum(teacher_logits.softmax(-1)[kept], q).sum()
    if kind == "ce":
        return -(p * q.log()).sum(), alpha
    if kind == "lk_alpha":
        return -alpha.log(), alpha
    share = torch.exp(-3 * alpha.detach())
    return share * (p * (p.log() - q.log())).sum() + (1 - share) * (1 - alpha), alpha
