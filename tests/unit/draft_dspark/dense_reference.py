"""DSpark's step written as plainly as possible from the maths: one guess at a time, full distributions, gradients by
autograd alone. Imports nothing of the project; the backbone is the dense one of DFlash's tests.

It is given the anchors: which ones are drawn is another question, with tests of its own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dense_parts import Document, weights_of
from ..draft_dflash.dense_reference import (
    Judged,
    Setting,
    block_states,
    counted_slots,
    is_refused,
    reverse_kl,
)


@dataclass
class Heads:
    markov: str = "vanilla"
    confidence: bool = True
    with_markov: bool = True
    first: int = 0  # slot of the first guess
    gamma: float = 4.0
    ce: float = 0.1
    l1: float = 0.9
    bce: float = 1.0


@dataclass
class Result:
    loss: Tensor
    denominators: list[float]  # one; with Draft-OPD also those of ``Judged``
    counted: list[int]  # per guess
    correct: list[int]
    overlap: list[float]
    lengths: list[int]  # per block: 1 + length of the correct prefix
    expected: list[float]  # per block: 1 + sum of products of overlaps
    chance: list[float]  # per guess: the target's probability of the draft's best token
    lengths_t1: list[float]  # per block: 1 + expected number of best tokens that the target accepts at T 1


def markov_bias(
    weights: dict[str, Tensor], kind: str, z: Tensor, e: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """[V']: what is added to the logits; and the recurrent state behind it."""
    own = weights_of(weights, "markov_head.")
    if kind == "vanilla":
        return own["markov_w2.weight"] @ e, memory
    if kind == "gated":
        gate = torch.sigmoid(own["gate_proj.weight"] @ torch.cat([z, e]) + own["gate_proj.bias"])
        return own["markov_w2.weight"] @ (gate * e), memory
    joint = own["joint_proj.weight"] @ torch.cat([memory, e, z]) + own["joint_proj.bias"]
    rank = len(e)
    g, c, o = joint[:rank], joint[rank : 2 * rank], joint[2 * rank :]
    keep = torch.sigmoid(g)
    return own["markov_w2.weight"] @ torch.tanh(o), keep * memory + (1 - keep) * torch.tanh(c)


def binary_cross_entropy(chance: Tensor, wanted: Tensor) -> Tensor:
    return -(wanted * chance.log() + (1 - wanted) * (1 - chance).log())


def dense_dspark(
    weights: dict[str, Tensor], documents: list[Document], setting: Setting, heads: Heads
) -> Result:
    """Loss of the documents as one global batch, with metrics. Guess j is of the token j + 1 behind the anchor."""
    guesses = setting.block_size - heads.first
    numerator = torch.zeros((), dtype=setting.embedding.dtype)
    result = Result(
        numerator, [0.0], [0] * guesses, [0] * guesses, [0.0] * guesses, [], [], [0.0] * guesses, []
    )
    judged = Judged()
    for document in documents:
        teacher = setting.teacher_logits(document)
        for anchor in document.anchors:
            states = block_states(weights, document, anchor, setting)[heads.first :]
            memory = torch.zeros(weights["markov_head.markov_w1.weight"].shape[1], dtype=states.dtype)
            length, alive, expected, reached, length_t1 = 1, True, 1.0, 1.0, 1.0
            for j in range(counted_slots(document, anchor, guesses + 1)):
                before, label = int(document.ids[anchor + j]), int(document.ids[anchor + j + 1])
                e = weights["markov_head.markov_w1.weight"][before]
                bias, memory = markov_bias(weights, heads.markov, states[j], e, memory)
                p = teacher[anchor + j].softmax(-1)
                q = torch.zeros_like(p)  # of tokens without a row
                q[setting.kept] = (setting.target_head[setting.kept] @ states[j] + bias).softmax(-1)
                distance = (p - q).abs().sum()
                cost = heads.l1 * distance
                if label in setting.kept:
                    cost = cost - heads.ce * q[label].log()
                refused = setting.opd and is_refused(document, anchor, j + 1)
                if refused:
                    cost = reverse_kl(q[setting.kept].log(), setting.kept, teacher[anchor + j])
                accepted = (1 - distance / 2).detach()
                if heads.confidence:
                    seen = torch.cat([states[j], e]) if heads.with_markov else states[j]
                    raw = (
                        weights["confidence_head.proj.weight"][0] @ seen
                        + weights["confidence_head.proj.bias"][0]
                    )
                    cost = cost + heads.bce * binary_cross_entropy(torch.sigmoid(raw), accepted)
                weight = math.exp(-j / heads.gamma)
                numerator = numerator + weight * cost
                judged.add(weight, cost, refused=refused)
                result.denominators[0] += weight
                correct = int(q.argmax()) == label
                chance = float(p[q.argmax()].detach())
                length_t1 += alive * chance
                alive = alive and correct
                reached *= float(accepted)
                length, expected = length + alive, expected + reached
                result.counted[j] += 1
                result.correct[j] += correct
                result.overlap[j] += float(accepted)
                result.chance[j] += chance
            result.lengths.append(length)
            result.lengths_t1.append(length_t1)
            result.expected.append(expected)
    result.loss = judged.loss if setting.opd else numerator / (result.denominators[0] or 1)
    result.denominators += judged.denominators if setting.opd else []
    return result
