"""DFlash's step written as plainly as possible from the maths: one block at a time, every mask spelled out entry by
entry, full logits, gradients by autograd alone. Imports nothing of the project; slow on purpose.

It is given the anchors: which ones are drawn is another question, with tests of its own.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dense_parts import Document, TargetSetting, attend, mlp, rms, rope, row_loss, weights_of


@dataclass(kw_only=True)
class Setting(TargetSetting):
    """Everything besides the draft's weights and the documents."""

    windows: list[tuple[int | None, bool]]  # per layer; None: full; and whether it is causal inside a block
    block_size: int
    mask_token_id: int
    num_features: int
    kept: list[int]  # tokens with a row in the draft's head
    gamma: float
    loss: str = "ce"
    alpha: float = 0.5
    opd: bool = False


@dataclass
class Result:
    loss: Tensor
    denominators: list[float]  # one; with Draft-OPD also those of ``Judged``
    counted: list[int]  # per slot 1 .. B - 1
    correct: list[int]
    slot_loss: list[float]
    lengths: list[int]  # per block: 1 + length of the correct prefix


def visible(anchor: int, num_tokens: int, sight: tuple[int | None, bool], block_size: int) -> Tensor:
    """bool [B, T + B]: which context tokens and which slots each slot of one block sees."""
    window, is_causal = sight
    mask = torch.zeros(block_size, num_tokens + block_size, dtype=torch.bool)
    for query in range(block_size):
        for token in range(num_tokens):
            near = window is None or token >= anchor + query - (window - 1)
            mask[query, token] = token < anchor and near
        for slot in range(block_size):
            mask[query, num_tokens + slot] = not is_causal or slot <= query
    return mask


def block_attention(own, context, y, anchor, window, setting: Setting) -> Tensor:
    """[B, H]: keys and values of the block are made of ``y``, those of the context of the features alone."""
    both, num_tokens = torch.cat([context, y]), len(context)
    positions = list(range(num_tokens)) + [anchor + k for k in range(len(y))]
    q, k, v = (
        (rows @ own[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, setting.head_dim))
        for name, rows in (("q", y), ("k", both), ("v", both))
    )
    q = rope(rms(q, own["self_attn.q_norm.weight"], setting.eps), positions[num_tokens:], setting)
    k = rope(rms(k, own["self_attn.k_norm.weight"], setting.eps), positions, setting)
    attended = attend(q, k, v, visible(anchor, num_tokens, window, len(y)))
    return attended @ own["self_attn.o_proj.weight"].T


def block_inputs(
    weights: dict[str, Tensor], document: Document, anchor: int, setting: Setting
) -> tuple[Tensor, Tensor]:
    """[T, H] of the context's features, and [B, H] of the embedded slots."""
    features = document.states[:, : setting.num_features].flatten(1)
    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], setting.eps)
    ids = [int(document.ids[anchor])] + [setting.mask_token_id] * (setting.block_size - 1)
    return context, setting.embedding[ids]


def block_states(weights: dict[str, Tensor], document: Document, anchor: int, setting: Setting) -> Tensor:
    """[B, H]: the head's inputs for one block."""
    context, x = block_inputs(weights, document, anchor, setting)
    for index, window in enumerate(setting.windows):
        own = weights_of(weights, f"layers.{index}.")
        normed = rms(x, own["input_layernorm.weight"], setting.eps)
        x = x + block_attention(own, context, normed, anchor, window, setting)
        x = x + mlp(own, rms(x, own["post_attention_layernorm.weight"], setting.eps))
    return rms(x, weights["norm.weight"], setting.eps)


def counted_slots(document: Document, anchor: int, block_size: int) -> int:
    """How many slots 1, 2, … are in the document and supervised, up to the first that is not."""
    count, most = 0, block_size - 1
    if document.rounds is not None:  # the accepted guesses, and the first that was not
        most = min(most, document.proposed, document.rounds[anchor] + 1)
    while count < most and anchor + count + 1 < len(document.ids):
        if not document.mask[anchor + count + 1]:
            break
        count += 1
    return count


def is_refused(document: Document, anchor: int, k: int) -> bool:
    """Whether the target refused guess k = 1, 2, … of the round that began at the anchor; a last token was not."""
    return (document.rounds or {}).get(anchor) == k - 1 and anchor + k + 1 < len(document.ids)


@dataclass
class Judged:
    """Draft-OPD: the mean of accepted guesses' losses and the weighted mean of refused ones' KL(q ‖ p), half each."""

    accepted: Tensor | float = 0.0
    refused: Tensor | float = 0.0
    num_accepted: int = 0
    refused_weight: float = 0.0

    def add(self, weight: float, cost: Tensor | None, *, refused: bool) -> None:
        cost = 0.0 if cost is None else cost
        if refused:
            self.refused = self.refused + weight * cost
            self.refused_weight += weight
        else:
            self.accepted = self.accepted + cost
            self.num_accepted += 1

    @property
    def denominators(self) -> list[float]:
        return [float(self.num_accepted), self.refused_weight]

    @property
    def loss(self) -> Tensor:
        halves = self.accepted / max(self.num_accepted, 1) + self.refused / (self.refused_weight or 1)
        return torch.as_tensor(halves, dtype=torch.float64) / 2


def reverse_kl(log_q: Tensor, kept: list[int], teacher_logits: Tensor) -> Tensor:
    """KL(q ‖ p) over the tokens whose log-probabilities are given; p: the target's, over the ``kept`` ones."""
    log_p = teacher_logits - teacher_logits[kept].logsumexp(0)
    return sum(log.exp() * (log - log_p[token]) for token, log in zip(kept, log_q, strict=True))


def block_weights(setting: Setting, crosses: list[Tensor | None]) -> list[float]:
    """Return the weights of the counted slots of one block. A slot without a loss is never right."""
    if setting.loss != "dpace":
        return [math.exp(-k / setting.gamma) for k in range(len(crosses))]
    # P_k: product of smoothed confidences of slots 1 to k; W_k: sum of P_i over i >= k.
    reached, product = [], 1.0
    for cross in crosses:
        confidence = 0.0 if cross is None else math.exp(-float(cross.detach()))
        product *= (1 - setting.alpha) * confidence + setting.alpha
        reached.append(product)
    return [sum(reached[k:]) for k in range(len(reached))]


SOFT = {"soft": "ce", "lk_alpha": "lk_alpha", "lk_lambda": "lk_lambda"}


def slot_loss(setting: Setting, logits: Tensor, teacher_logits: Tensor, label: int) -> Tensor | None:
    """The loss of one slot; None if its target has no row in the head."""
    wanted = int(teacher_logits.argmax()) if setting.loss in SOFT else label
    if wanted not in setting.kept:
        return None
    if setting.loss in SOFT:
        return row_loss(SOFT[setting.loss], logits, teacher_logits, torch.tensor(setting.kept))[0]
    return -logits.log_softmax(-1)[setting.kept.index(label)]


def dense_dflash(weights: dict[str, Tensor], documents: list[Document], setting: Setting) -> Result:
    """Loss of the documents as one global batch, with metrics."""
    slots = setting.block_size - 1
    numerator = torch.zeros((), dtype=setting.embedding.dtype)
    result = Result(numerator, [0.0], [0] * slots, [0] * slots, [0.0] * slots, [])
    judged = Judged()
    for document in documents:
        teacher = setting.teacher_logits(document)
        for anchor in document.anchors:
            states = block_states(weights, document, anchor, setting)
            crosses, refused, length, alive = [], [], 1, True
            for k in range(1, counted_slots(document, anchor, setting.block_size) + 1):
                logits, label = states[k] @ setting.target_head[setting.kept].T, int(document.ids[anchor + k])
                crosses.append(slot_loss(setting, logits, teacher[anchor + k - 1], label))
                refused.append(is_refused(document, anchor, k))
                if setting.opd and refused[-1]:
                    is_taught = int(teacher[anchor + k - 1].argmax()) in setting.kept
                    kl = reverse_kl(logits.log_softmax(-1), setting.kept, teacher[anchor + k - 1])
                    crosses[-1] = kl if is_taught else None
                correct = setting.kept[int(logits.argmax())] == label
                alive = alive and correct
                length += alive
                result.counted[k - 1] += 1
                result.correct[k - 1] += correct
                result.slot_loss[k - 1] += 0.0 if crosses[-1] is None else float(crosses[-1].detach())
            result.lengths.append(length)
            weights_of_block = block_weights(setting, crosses)
            for weight, cross, is_wrong in zip(weights_of_block, crosses, refused, strict=True):
                judged.add(weight, cross, refused=is_wrong)
                numerator = numerator if cross is None else numerator + weight * cross
                result.denominators[0] += 1.0 if setting.loss == "dpace" else weight
    result.loss = judged.loss if setting.opd else numerator / (result.denominators[0] or 1)
    result.denominators += judged.denominators if setting.opd else []
    return result
