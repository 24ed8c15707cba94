"""LiLiCorr's step written as plainly as possible from the maths: one block, one candidate and one pair of candidates
at a time, full distributions, gradients by autograd alone. Imports nothing of the project.

It is given the anchors: which ones are drawn is another question, with tests of its own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, silu

from ..dense_parts import Document, rms, weights_of
from ..draft_dflash.dense_reference import Judged, Setting, block_inputs, counted_slots, is_refused
from ..draft_dflash.dense_reference import block_states as plain_states
from ..draft_dflash2.dense_reference import Selector
from ..draft_dflash2.dense_reference import block_states as convolved_states


@dataclass
class Paths:
    """The convolutions' sizes, the path head's, and the weights of the losses."""

    convolution: Selector
    top_k: int
    heads: int
    layers: int
    scale: float
    vector_eps: float
    gamma: float
    ce: float
    soft: float
    path: float
    hinge: float
    margin: float
    penalty: float


@dataclass
class Result:
    loss: Tensor
    denominators: list[float]  # the head's and the path's; with Draft-OPD also those of ``Judged``
    counted: list[int]  # per guess
    correct: list[int]  # of the step from the data's token
    head_correct: list[int]
    recalled: list[int]  # the label is a candidate
    path_loss: list[float]
    lengths: list[int]  # per block: 1 + length of the correct prefix
    chance: list[float]  # per guess: the target's probability of the choice
    lengths_t1: list[float]  # per block: 1 + expected number of choices that the target accepts at T 1


def linear(own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]


def mlp(own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return linear(own, f"{name}.down_proj", silu(linear(own, f"{name}.up_proj", x)))


def layer_norm(own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-5) * own[f"{name}.weight"] + own[f"{name}.bias"]


def unit(x: Tensor, eps: float) -> Tensor:
    return x / torch.clamp(torch.sqrt((x * x).sum(-1, keepdim=True)), min=eps)


def lattice(own, states: Tensor, chances: Tensor, chosen: list[list[int]], setting, parts) -> Tensor:
    """[slots · candidates, D]: the candidates' vectors before any layer, slot after slot."""
    rows, features = [], []
    for slot, tokens in enumerate(chosen):
        for rank, token in enumerate(tokens):
            log, best = chances[slot, token], chances[slot, tokens[0]]
            share = rank / (parts.top_k - 1) if parts.top_k > 1 else 0.0
            others = torch.tensor([share, float(rank == 0)], dtype=log.dtype)
            features.append(torch.cat([torch.stack([log, log.exp(), log - best]), others]))
            embedded = setting.embedding[token]
            x = linear(own, "token_proj", embedded) if "token_proj.weight" in own else embedded
            x = x + linear(own, "pass_hidden_proj", states[slot])
            rows.append(x + own["slot_embedding"][0, 0, slot, 0] + own["rank_embedding"][0, 0, 0, rank])
    return torch.stack(rows) + mlp(own, "feature_mlp", layer_norm(own, "feature_norm", torch.stack(features)))


def attention(own: dict[str, Tensor], head: dict[str, Tensor], x: Tensor, parts: Paths) -> Tensor:
    """[L, D]; ``own``: the layer's weights, ``head``: the path head's."""
    width, centre = x.shape[1], head["relative_slot_bias"].shape[1] // 2
    size = width // parts.heads
    projected = x @ own["attn.in_proj_weight"].T + own["attn.in_proj_bias"]
    slots = [row // parts.top_k for row in range(len(x))]
    place = torch.tensor([[centre + query - key for key in slots] for query in slots])
    same = torch.tensor([[float(query == key) for key in slots] for query in slots], dtype=x.dtype)
    pieces = []
    for number in range(parts.heads):
        at = slice(number * size, (number + 1) * size)
        q, k, v = (projected[:, kind * width : (kind + 1) * width][:, at] for kind in range(3))
        bias = head["relative_slot_bias"][number][place] + head["same_slot_bias"][number] * same
        pieces.append((q @ k.T / math.sqrt(size) + bias).softmax(-1) @ v)
    return linear(own, "attn.out_proj", torch.cat(pieces, -1))


def path_scores(weights, states: Tensor, logits: Tensor, anchor: Tensor | None, setting, parts):
    """The candidates of each slot, the scores of the first slot's, and those of a step: [slot][before][after]."""
    head, eps, k = weights_of(weights, "lilicorr."), setting.eps, parts.top_k
    chosen = [
        sorted(range(len(row)), key=lambda token, row=row: -float(row[token].detach()))[:k] for row in logits
    ]
    x = lattice(head, states, logits.log_softmax(-1), chosen, setting, parts)
    for index in range(parts.layers):
        own = weights_of(head, f"layers.{index}.")
        x = x + attention(own, head, rms(x, own["attn_norm.weight"], eps), parts)
        x = x + mlp(own, "mlp", rms(x, own["mlp_norm.weight"], eps))
    x = rms(x, head["output_norm.weight"], eps)
    projected = linear(head, "context_proj", states[0] * 0 if anchor is None else anchor)
    first = rms(projected * (anchor is not None), head["anchor_norm.weight"], eps)
    inner = silu(linear(head, "factor_input_proj", torch.cat([x, first.expand_as(x), x * first], -1)))
    out, into = (unit(linear(head, name, inner), parts.vector_eps) for name in ("out_head", "in_head"))
    start = parts.scale * into[:k] @ unit(linear(head, "anchor_out_head", first), parts.vector_eps)
    pairs = [(out[s * k : (s + 1) * k], into[(s + 1) * k : (s + 2) * k]) for s in range(len(states) - 1)]
    return chosen, start, [parts.scale * before @ after.T for before, after in pairs]


def path_loss(score: Tensor, label: int, wanted_logits: Tensor, parts: Paths) -> Tensor:
    """``label``: the place of the data's token; ``wanted_logits``: the target's, of each candidate."""
    chance = score.softmax(0)
    others = [score[c] for c in range(len(score)) if c != label]
    lacking = parts.margin - score[label] + torch.stack(others).max() if others else score.sum() * 0
    expected = sum(
        chance[c] * max(float(wanted_logits[label] - wanted_logits[c]), 0.0) for c in range(len(score))
    )
    return (
        parts.path * -chance[label].log()
        + parts.hinge * torch.clamp(lacking, min=0)
        + parts.penalty * expected
    )


def dense_lilicorr(weights, documents: list[Document], setting: Setting, parts: Paths) -> Result:
    """Loss of the documents as one global batch, with metrics. Slot k guesses the k-th token behind the anchor."""
    guesses = setting.block_size - 1
    zero = torch.zeros((), dtype=setting.embedding.dtype)
    head_sum, path_sum = zero, zero
    floats = [[0.0] * guesses for _ in range(2)]
    judged = Judged()
    result = Result(zero, [0.0, 0.0], *([0] * guesses for _ in range(4)), floats[0], [], floats[1], [])
    for document in documents:
        teacher = setting.teacher_logits(document)
        for anchor in document.anchors:
            if parts.convolution.taps:
                states = convolved_states(weights, document, anchor, setting, parts.convolution)[1:]
            else:
                states = plain_states(weights, document, anchor, setting)[1:]
            logits = states @ setting.target_head.T
            context, _ = block_inputs(weights, document, anchor, setting)
            before = context[anchor - 1] if anchor > 0 else None
            chosen, score, steps = path_scores(weights, states, logits, before, setting, parts)
            length, length_t1, alive, reached = 1, 1.0, True, True
            for k in range(counted_slots(document, anchor, setting.block_size)):
                label, expected = int(document.ids[anchor + k + 1]), teacher[anchor + k]
                wanted = parts.soft * expected.softmax(-1)
                wanted = wanted + parts.ce * one_hot(torch.tensor(label), len(expected)).to(wanted)
                weight = math.exp(-k / parts.gamma)
                head_cost = -(wanted * logits[k].log_softmax(-1)).sum()
                head_sum = head_sum + weight * head_cost
                refused, path_cost = setting.opd and is_refused(document, anchor, k + 1), 0.0
                if refused and reached:
                    log_s = score.log_softmax(0)
                    path_cost = (log_s.exp() * (log_s - expected.log_softmax(0)[chosen[k]])).sum()
                    result.path_loss[k] += float(path_cost.detach())
                result.denominators[0] += weight
                result.denominators[1] += 1
                result.counted[k] += 1
                result.head_correct[k] += int(logits[k].argmax()) == label
                result.recalled[k] += label in chosen[k]
                if reached:
                    choice = chosen[k][int(score.argmax())]
                    chance = float(expected.softmax(-1)[choice])
                    result.correct[k] += choice == label
                    result.chance[k] += chance
                    length_t1 += alive * chance
                    alive = alive and choice == label
                    length += alive
                if reached and label in chosen[k]:
                    place = chosen[k].index(label)
                    if not refused:
                        path_cost = path_loss(score, place, expected[chosen[k]], parts)
                        path_sum = path_sum + path_cost
                        result.path_loss[k] += float(path_cost.detach())
                    if k + 1 < guesses:
                        score = steps[k][place]
                else:
                    reached = False
                judged.add(weight, path_cost if refused else head_cost + path_cost, refused=refused)
            result.lengths.append(length)
            result.lengths_t1.append(length_t1)
    result.loss = head_sum / (result.denominators[0] or 1) + path_sum / (result.denominators[1] or 1)
    if setting.opd:
        result.loss = judged.loss
        result.denominators += judged.denominators
    return result
