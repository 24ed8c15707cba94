"""The step of an MTP head written as plainly as possible from the maths: one document at a time, explicit masks over
all keys, full logits, gradients by autograd alone. Imports nothing of the project; slow on purpose."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Setting:
    """Everything besides the head's weights and the documents."""

    embedding: Tensor  # [V, H]
    target_head: Tensor  # [V, H]
    target_norm: Tensor  # [H], what multiplies
    heads: int
    head_dim: int
    rotated: int
    theta: float
    eps: float
    steps: int
    decay: float


@dataclass
class Document:
    ids: Tensor  # [T]
    states: Tensor  # [T, H]: inputs of the target's final norm
    mask: Tensor  # [T]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, setting: Setting) -> Tensor:
    """x [T, heads, head_dim]: x · cos + rotate_half(x) · sin over the rotated channels."""
    frequency = 1.0 / setting.theta ** (torch.arange(0, setting.rotated, 2).float() / setting.rotated)
    angle = positions.to(x.dtype)[:, None] * frequency.to(x.dtype)
    angle = torch.cat([angle, angle], -1)[:, None]
    front, half = x[..., : setting.rotated], setting.rotated // 2
    turned = torch.cat([-front[..., half:], front[..., :half]], -1)
    return torch.cat([front * angle.cos() + turned * angle.sin(), x[..., setting.rotated :]], -1)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Query t sees keys ≤ t of step 0 and, of each later step, its own index only."""
    num_tokens, heads, dim = q.shape
    group = heads // keys[0].shape[1]
    all_keys, all_values = (torch.cat(part).repeat_interleave(group, 1) for part in (keys, values))
    causal, own = torch.ones(num_tokens, num_tokens).tril().bool(), torch.eye(num_tokens).bool()
    mask = torch.cat([causal] + [own] * (len(keys) - 1), -1)
    scores = torch.einsum("thd,uhd->htu", q, all_keys) / dim**0.5
    return torch.einsum("htu,uhd->thd", scores.masked_fill(~mask, -torch.inf).softmax(-1), all_values)


def head_inputs(weights: dict[str, Tensor], document: Document, setting: Setting) -> list[Tensor]:
    """S tensors [T, H]: u of each step, which the target's head is multiplied by and the next step continues from."""
    layer, eps, num_tokens = "mtp.layers.0.", setting.eps, len(document.ids)
    time, keys, values, outputs = torch.arange(num_tokens), [], [], []

    def normed(x: Tensor, name: str) -> Tensor:
        return rms(x, 1 + weights[f"{name}.weight"], eps)

    state = rms(document.states, setting.target_norm, eps)
    for step in range(setting.steps):
        token = setting.embedding[document.ids[torch.clamp(time + 1 + step, max=num_tokens - 1)]]
        both = [normed(token, "mtp.pre_fc_norm_embedding"), normed(state, "mtp.pre_fc_norm_hidden")]
        y = torch.cat(both, -1) @ weights["mtp.fc.weight"].T
        x = normed(y, layer + "input_layernorm")
        q, k, v = (
            (x @ weights[f"{layer}self_attn.{name}_proj.weight"].T).view(num_tokens, -1, width)
            for name, width in (("q", 2 * setting.head_dim), ("k", setting.head_dim), ("v", setting.head_dim))
        )
        q, gate = q[..., : setting.head_dim], q[..., setting.head_dim :]
        keys.append(rope(normed(k, layer + "self_attn.k_norm"), time + step, setting))
        values.append(v)
        attended = attend(rope(normed(q, layer + "self_attn.q_norm"), time + step, setting), keys, values) / (
            1 + torch.exp(-gate)
        )
        y = y + attended.flatten(1) @ weights[layer + "self_attn.o_proj.weight"].T
        x = normed(y, layer + "post_attention_layernorm")
        up = x @ weights[layer + "mlp.up_proj.weight"].T
        inner = torch.nn.functional.silu(x @ weights[layer + "mlp.gate_proj.weight"].T) * up
        state = normed(y + inner @ weights[layer + "mlp.down_proj.weight"].T, "mtp.norm")
        outputs.append(state)
    return outputs


def dense_mtp(
    weights: dict[str, Tensor],
    documents: list[Document],
    setting: Setting,
    inputs: Callable[[dict[str, Tensor], Document, Setting], list[Tensor]] = head_inputs,
) -> tuple[Tensor, list[int]]:
    """Loss of the documents as one global batch, and the labels of each step. ``inputs``: another kind of head."""
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(setting.steps)], [0] * setting.steps
    for document in documents:
        outputs = inputs(weights, document, setting)
        teacher = (rms(document.states, setting.target_norm, setting.eps) @ setting.target_head.T).softmax(-1)
        for step, output in enumerate(outputs):
            for t in range(len(document.ids) - 2 - step):
                if document.mask[t + 2 + step]:
                    logits = output[t] @ setting.target_head.T
                    sums[step] = sums[step] - (teacher[t + 1 + step] * logits.log_softmax(-1)).sum()
                    counts[step] += 1
    terms = (setting.decay**s * total / n for s, (total, n) in enumerate(zip(sums, counts, strict=True)) if n)
    return sum(terms, sums[0] * 0), counts
