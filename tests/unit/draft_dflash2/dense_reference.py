"""DFlash2's step written as plainly as possible from the maths: one block and one slot at a time, every tap of every
channel spelled out, full distributions, gradients by autograd alone. Imports nothing of the project.

It is given the anchors: which ones are drawn is another question, with tests of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..draft_dflash.dense_reference import Document, Setting, counted_slots, rms, rope, visible


@dataclass
class Selector:
    """The convolutions' sizes, and the selector's."""

    taps: int = 2
    group: int = 4
    top_k: int = 5
    gamma: float = 4.0
    ce: float = 0.0
    soft: float = 1.0
    weight: float = 1.0


@dataclass
class Result:
    loss: Tensor
    denominator: float
    counted: list[int]  # per guess
    correct: list[int]  # by the selector's choice
    head_correct: list[int]
    recalled: list[int]  # the label is a candidate
    lengths: list[int]  # per block: 1 + length of the correct prefix


def taps_of(x: Tensor, own: dict[str, Tensor], name: str, sizes: Selector) -> Tensor:
    """[B, 2, taps, H]: what each channel of each slot before is multiplied by, for input (0) and output (1)."""
    block, width = x.shape
    moving = (x @ own[f"{name}.kernel_projection.weight"].T).reshape(
        block, 2, sizes.taps, width // sizes.group
    )
    return own[f"{name}.base_kernel"] + moving.repeat_interleave(sizes.group, -1)


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    """[B, H]; taps [B, taps, H]."""
    rows = []
    for slot in range(len(x)):
        rows.append(sum(taps[slot, back] * x[slot - back] for back in range(taps.shape[1]) if back <= slot))
    return torch.stack(rows)


def attention(own, context, y, anchor, setting, window):
    """[B, H]: keys and values of the block are made of ``y``, those of the context of the features alone."""
    both, num_tokens = torch.cat([context, y]), len(context)
    positions = list(range(num_tokens)) + [anchor + k for k in range(len(y))]

    def heads(rows, name):
        return (rows @ own[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, setting.head_dim))

    q = rms(heads(y, "q"), own["self_attn.q_norm.weight"], setting.eps)
    k = rms(heads(both, "k"), own["self_attn.k_norm.weight"], setting.eps)
    q, k, v = rope(q, positions[num_tokens:], setting), rope(k, positions, setting), heads(both, "v")
    group = setting.num_heads // setting.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bhd,uhd->hbu", q, k) / setting.head_dim**0.5
    probs = scores.masked_fill(~visible(anchor, num_tokens, window, len(y)), -torch.inf).softmax(-1)
    return torch.einsum("hbu,uhd->bhd", probs, v).flatten(1) @ own["self_attn.o_proj.weight"].T


def mlp(own, y):
    gate = torch.nn.functional.silu(y @ own["mlp.gate_proj.weight"].T)
    return (gate * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T


def block_states(
    weights: dict[str, Tensor], document: Document, anchor: int, setting: Setting, sizes: Selector
) -> Tensor:
    """[B, H]: the head's inputs for one block."""
    features = document.states[:, : setting.num_features].flatten(1)
    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], setting.eps)
    ids = [int(document.ids[anchor])] + [setting.mask_token_id] * (setting.block_size - 1)
    x = setting.embedding[ids]
    for index, window in enumerate(setting.windows):
        own = {k.removeprefix(f"layers.{index}."): v for k, v in weights.items() if f"layers.{index}." in k}
        normed = rms(x, own["input_layernorm.weight"], setting.eps)
        taps = taps_of(normed, own, "attention_conv", sizes)
        attended = attention(own, context, convolved(normed, taps[:, 0]), anchor, setting, window)
        x = x + convolved(attended, taps[:, 1])
        normed = rms(x, own["post_attention_layernorm.weight"], setting.eps)
        taps = taps_of(normed, own, "mlp_conv", sizes)
        x = x + convolved(mlp(own, convolved(normed, taps[:, 0])), taps[:, 1])
    return rms(x, weights["norm.weight"], setting.eps)


def candidate_scores(
    weights: dict[str, Tensor], state: Tensor, logits: Tensor, before: int, sizes: Selector
) -> dict[int, Tensor]:
    """The score of each candidate."""
    own = {k.removeprefix("candidate_selector."): v for k, v in weights.items() if "candidate_selector." in k}
    projected = own["hidden_projection.weight"] @ state
    context = own["predecessor_codebook"][before] * projected
    likeliest = sorted(range(len(logits)), key=lambda token: -float(logits[token].detach()))[: sizes.top_k]
    return {token: logits[token] + context @ own["successor_codebook"][token] for token in likeliest}


def dense_dflash2(
    weights: dict[str, Tensor], documents: list[Document], setting: Setting, sizes: Selector
) -> Result:
    """Loss of the documents as one global batch, with metrics. Slot k guesses the k-th token behind the anchor."""
    guesses = setting.block_size - 1
    numerator = torch.zeros((), dtype=setting.embedding.dtype)
    result = Result(numerator, 0.0, *([0] * guesses for _ in range(4)), [])
    for document in documents:
        for anchor in document.anchors:
            states, length, alive = block_states(weights, document, anchor, setting, sizes), 1, True
            for k in range(1, counted_slots(document, anchor, setting.block_size) + 1):
                before, label = int(document.ids[anchor + k - 1]), int(document.ids[anchor + k])
                logits = setting.target_head @ states[k]
                teacher = rms(document.states[anchor + k - 1, -1], setting.target_norm, setting.eps)
                wanted = sizes.soft * (setting.target_head @ teacher).softmax(-1)
                label_alone = torch.nn.functional.one_hot(torch.tensor(label), len(logits))
                wanted = wanted + sizes.ce * label_alone.to(wanted)
                scores = candidate_scores(weights, states[k], logits, before, sizes)
                chances = torch.stack(list(scores.values())).log_softmax(-1)
                cost = -(wanted * logits.log_softmax(-1)).sum()
                cost = cost - sizes.weight * sum(
                    wanted[token] * log for token, log in zip(scores, chances, strict=True)
                )
                weight = math.exp(-(k - 1) / sizes.gamma)
                numerator = numerator + weight * cost
                result.denominator += weight
                correct = max(scores, key=lambda token: float(scores[token].detach())) == label
                alive = alive and correct
                length += alive
                result.counted[k - 1] += 1
                result.correct[k - 1] += correct
                result.head_correct[k - 1] += int(logits.argmax()) == label
                result.recalled[k - 1] += label in scores
            result.lengths.append(length)
    result.loss = numerator / result.denominator if result.denominator else numerator
    return result
