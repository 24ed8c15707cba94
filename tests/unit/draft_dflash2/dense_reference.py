"""DFlash2's step written as plainly as possible from the maths: one block and one slot at a time, every tap of every
channel spelled out, full distributions, gradients by autograd alone. Imports nothing of the project.

It is given the anchors: which ones are drawn is another question, with tests of its own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dense_parts import Document, mlp, rms, weights_of
from ..draft_dflash.dense_reference import (
    Judged,
    Setting,
    block_attention,
    block_inputs,
    counted_slots,
    is_refused,
)


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
    denominators: list[float]  # one; with Draft-OPD also those of ``Judged``
    counted: list[int]  # per guess
    correct: list[int]  # by the selector's choice
    head_correct: list[int]
    recalled: list[int]  # the label is a candidate
    lengths: list[int]  # per block: 1 + length of the correct prefix
    chance: list[float]  # per guess: the target's probability of the selector's choice
    lengths_t1: list[float]  # per block: 1 + expected number of choices that the target accepts at T 1


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


def block_states(
    weights: dict[str, Tensor], document: Document, anchor: int, setting: Setting, sizes: Selector
) -> Tensor:
    """[B, H]: the head's inputs for one block."""
    context, x = block_inputs(weights, document, anchor, setting)
    for index, window in enumerate(setting.windows):
        own = weights_of(weights, f"layers.{index}.")
        normed = rms(x, own["input_layernorm.weight"], setting.eps)
        taps = taps_of(normed, own, "attention_conv", sizes)
        attended = block_attention(own, context, convolved(normed, taps[:, 0]), anchor, window, setting)
        x = x + convolved(attended, taps[:, 1])
        normed = rms(x, own["post_attention_layernorm.weight"], setting.eps)
        taps = taps_of(normed, own, "mlp_conv", sizes)
        x = x + convolved(mlp(own, convolved(normed, taps[:, 0])), taps[:, 1])
    return rms(x, weights["norm.weight"], setting.eps)


def candidate_scores(
    weights: dict[str, Tensor], state: Tensor, logits: dict[int, Tensor], before: int, sizes: Selector
) -> dict[int, Tensor]:
    """The score of each candidate, by its token."""
    own = weights_of(weights, "candidate_selector.")
    projected = own["hidden_projection.weight"] @ state
    context = own["predecessor_codebook"][before] * projected
    likeliest = sorted(logits, key=lambda token: -float(logits[token].detach()))[: sizes.top_k]
    return {token: logits[token] + context @ own["successor_codebook"][token] for token in likeliest}


def dense_dflash2(
    weights: dict[str, Tensor], documents: list[Document], setting: Setting, sizes: Selector
) -> Result:
    """Loss of the documents as one global batch, with metrics. Slot k guesses the k-th token behind the anchor."""
    guesses = setting.block_size - 1
    numerator = torch.zeros((), dtype=setting.embedding.dtype)
    result = Result(numerator, [0.0], *([0] * guesses for _ in range(4)), [], [0.0] * guesses, [])
    judged = Judged()
    for document in documents:
        teacher = setting.teacher_logits(document)
        for anchor in document.anchors:
            states, length, alive = block_states(weights, document, anchor, setting, sizes), 1, True
            length_t1 = 1.0
            for k in range(1, counted_slots(document, anchor, setting.block_size) + 1):
                before, label = int(document.ids[anchor + k - 1]), int(document.ids[anchor + k])
                kept = setting.kept
                logits = setting.target_head[kept] @ states[k]
                wanted = sizes.soft * teacher[anchor + k - 1].softmax(-1)
                label_alone = torch.nn.functional.one_hot(torch.tensor(label), len(wanted))
                wanted = wanted + sizes.ce * label_alone.to(wanted)
                by_token = dict(zip(kept, logits, strict=True))
                scores = candidate_scores(weights, states[k], by_token, before, sizes)
                chances = torch.stack(list(scores.values())).log_softmax(-1)
                cost = -(wanted[kept] * logits.log_softmax(-1)).sum()
                cost = cost - sizes.weight * sum(
                    wanted[token] * log for token, log in zip(scores, chances, strict=True)
                )
                refused = setting.opd and is_refused(document, anchor, k)
                if refused:
                    expected = teacher[anchor + k - 1]
                    log_p = expected - expected[kept].logsumexp(0)
                    cost = sum(
                        log.exp() * (log - log_p[token]) for token, log in zip(scores, chances, strict=True)
                    )
                weight = math.exp(-(k - 1) / sizes.gamma)
                numerator = numerator + weight * cost
                judged.add(weight, cost, refused=refused)
                result.denominators[0] += weight
                guess = max(scores, key=lambda token: float(scores[token].detach()))
                correct = guess == label
                chance = float(teacher[anchor + k - 1].softmax(-1)[guess])
                result.chance[k - 1] += chance
                length_t1 += alive * chance
                alive = alive and correct
                length += alive
                result.counted[k - 1] += 1
                result.correct[k - 1] += correct
                result.head_correct[k - 1] += kept[int(logits.argmax())] == label
                result.recalled[k - 1] += label in scores
            result.lengths.append(length)
            result.lengths_t1.append(length_t1)
    result.loss = judged.loss if setting.opd else numerator / (result.denominators[0] or 1)
    result.denominators += judged.denominators if setting.opd else []
    return result
