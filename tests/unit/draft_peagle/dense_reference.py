"""P-EAGLE's step written as plainly as possible from the maths: a list of elements per document, one mask over all of
them, full logits, gradients by autograd alone. Imports nothing of the project; slow on purpose.

Element (a, d): guess d of the chain at row a. It is given the elements: which ones are drawn is another question,
with tests of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Setting:
    """Everything besides the draft's weights and the documents."""

    embedding: Tensor  # [V, H]
    target_head: Tensor  # [V, H]
    target_norm: Tensor  # [H]
    kept: list[int]  # ids of the draft's vocabulary
    inv_freq: Tensor  # [rotated / 2]
    rope_scale: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    num_layers: int
    mask_token_id: int
    num_guesses: int
    logit_scale: float = 1.0
    loss: str = "ce"


@dataclass
class Document:
    ids: Tensor  # [T]
    states: Tensor  # [T, n + 1, H]: n captured layers, then the input of the target's final norm
    mask: Tensor  # [T]
    elements: list[tuple[int, int]] = field(default_factory=list)  # (a, d) that count


@dataclass
class Result:
    loss: Tensor
    counted: list[int]  # per guess
    agreed: list[int]
    acceptance: list[float]
    guess_loss: list[float]
    prefixes: list[int]  # chains that agree in all guesses up to each


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, setting: Setting) -> Tensor:
    angle = positions.to(x.dtype)[:, None] * setting.inv_freq.to(x.dtype)
    angle = torch.cat([angle, angle], -1)[:, None]
    rotated = x[..., : angle.shape[-1]]
    half = rotated.shape[-1] // 2
    turned = torch.cat([-rotated[..., half:], rotated[..., :half]], -1)
    mixed = (rotated * angle.cos() + turned * angle.sin()) * setting.rope_scale
    return torch.cat([mixed, x[..., angle.shape[-1] :]], -1)


def sees(query: tuple[int, int], key: tuple[int, int]) -> bool:
    (a, d), (b, e) = query, key
    return (e == 0 and b <= a) or (a == b and e <= d)


def layer_output(
    weights: dict[str, Tensor],
    name: str,
    states: tuple[Tensor, Tensor],
    elements: list[tuple[int, int]],
    setting: Setting,
) -> Tensor:
    u, e = states
    x = rms(e if name == "layers.0." else u, weights[name + "input_layernorm.weight"], setting.eps)
    if name == "layers.0.":
        x = torch.cat([x, rms(u, weights[name + "hidden_norm.weight"], setting.eps)], -1)
    positions, n = torch.tensor([a + d for a, d in elements]), len(elements)
    sizes = ("q", setting.num_heads), ("k", setting.num_kv_heads), ("v", setting.num_kv_heads)
    q, k, v = (
        (x @ weights[f"{name}self_attn.{kind}_proj.weight"].T).view(n, heads, setting.head_dim)
        for kind, heads in sizes
    )
    group = setting.num_heads // setting.num_kv_heads
    q, k = rope(q, positions, setting), rope(k, positions, setting).repeat_interleave(group, 1)
    mask = torch.tensor([[sees(query, key) for key in elements] for query in elements])
    scores = torch.einsum("thd,uhd->htu", q, k) / setting.head_dim**0.5
    probs = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    attended = torch.einsum("htu,uhd->thd", probs, v.repeat_interleave(group, 1)).flatten(1)
    u = u + attended @ weights[name + "self_attn.o_proj.weight"].T
    y = rms(u, weights[name + "post_attention_layernorm.weight"], setting.eps)
    gate = torch.nn.functional.silu(y @ weights[name + "mlp.gate_proj.weight"].T)
    return (
        u + (gate * (y @ weights[name + "mlp.up_proj.weight"].T)) @ weights[name + "mlp.down_proj.weight"].T
    )


def element_states(
    weights: dict[str, Tensor], document: Document, setting: Setting
) -> dict[tuple[int, int], Tensor]:
    """Input of the head of every element; all rows of the document are elements (a, 0)."""
    elements = [(a, 0) for a in range(len(document.ids) - 1)]
    elements += [(a, d) for a, d in document.elements if d > 0]
    raw, tokens = [], []
    for a, d in elements:
        raw.append(document.states[a, :-1].flatten() if d == 0 else weights["mask_hidden"].flatten())
        tokens.append(int(document.ids[a + 1]) if d == 0 else setting.mask_token_id)
    e, u = setting.embedding[tokens], torch.stack(raw) @ weights["fc.weight"].T
    for index in range(setting.num_layers):
        u = layer_output(weights, f"layers.{index}.", (u, e), elements, setting)
    return dict(zip(elements, rms(u, weights["norm.weight"], setting.eps), strict=True))


def guess_loss(kind: str, logits: Tensor, teacher_logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, α) of one guess."""
    q, p = logits.softmax(-1), teacher_logits[kept].softmax(-1)
    alpha = torch.minimum(teacher_logits.softmax(-1)[kept], q).sum()
    if kind == "ce":
        return -(p * q.log()).sum(), alpha
    if kind == "lk_alpha":
        return -alpha.log(), alpha
    share = torch.exp(-3 * alpha.detach())
    return share * (p * (p.log() - q.log())).sum() + (1 - share) * (1 - alpha), alpha


def dense_peagle(weights: dict[str, Tensor], documents: list[Document], setting: Setting) -> Result:
    """Loss of the documents as one global batch, with metrics."""
    guesses, kept = setting.num_guesses, torch.tensor(setting.kept)
    total = torch.zeros((), dtype=setting.embedding.dtype)
    zeros = [0] * guesses
    result = Result(total, [*zeros], [*zeros], [0.0] * guesses, [0.0] * guesses, [*zeros])
    for document in documents:
        if not document.elements:
            continue
        states, agreeing = element_states(weights, document, setting), set[tuple[int, int]]()
        for a, d in sorted(document.elements):
            logits = states[a, d] @ weights["lm_head.weight"].T
            teacher = rms(document.states[a + 1 + d, -1], setting.target_norm, setting.eps)
            z = setting.target_head @ teacher * setting.logit_scale
            value, alpha = guess_loss(setting.loss, logits, z, kept)
            if int(z.argmax()) in setting.kept:
                total = total + value
                result.guess_loss[d] += float(value.detach())
            agreed = int(kept[logits.argmax()]) == int(z.argmax())
            result.counted[d] += 1
            result.agreed[d] += agreed
            result.acceptance[d] += float(alpha.detach())
            if agreed and (d == 0 or (a, d - 1) in agreeing):
                agreeing.add((a, d))
                result.prefixes[d] += 1
    result.loss = total / max(1, sum(result.counted))
    return result
