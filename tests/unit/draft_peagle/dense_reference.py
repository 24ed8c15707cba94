"""P-EAGLE's step written as plainly as possible from the maths: a list of elements per document, one mask over all of
them, full logits, gradients by autograd alone. Imports nothing of the project; slow on purpose.

Element (a, d): guess d of the chain at row a. It is given the elements: which ones are drawn is another question,
with tests of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..dense_parts import Document, TargetSetting, attend, mlp, rms, rope, row_loss, weights_of


@dataclass(kw_only=True)
class Setting(TargetSetting):
    """Everything besides the draft's weights and the documents."""

    kept: list[int]  # ids of the draft's vocabulary
    num_layers: int
    mask_token_id: int
    num_guesses: int
    loss: str = "ce"
    norm_before_residual: bool = False
    norm_before_fc: bool = False


@dataclass
class Result:
    loss: Tensor
    counted: list[int]  # per guess
    agreed: list[int]
    acceptance: list[float]
    guess_loss: list[float]
    prefixes: list[int]  # chains that agree in all guesses up to each
    reached: list[int]  # chains as long as this, before any is dropped

    @property
    def denominators(self) -> list[int]:
        return self.counted + self.reached

    chance: list[float]  # per guess: the target's probability of the draft's best token
    prefixes_t1: list[float]  # the same, of guesses whose chain the data follow up to them
    prefixes_data: list[int]  # number of chains that the data follow up to and with this guess


def sees(query: tuple[int, int], key: tuple[int, int]) -> bool:
    (a, d), (b, e) = query, key
    return (e == 0 and b <= a) or (a == b and e <= d)


def layer_output(
    own: dict[str, Tensor], u: Tensor, token: Tensor | None, elements: list[tuple[int, int]], setting: Setting
) -> Tensor:
    """``token``: embeddings that the first layer sees beside the states."""
    x = rms(u if token is None else token, own["input_layernorm.weight"], setting.eps)
    if token is not None:
        normed = rms(u, own["hidden_norm.weight"], setting.eps)
        x, u = torch.cat([x, normed], -1), normed if setting.norm_before_residual else u
    q, k, v = (
        (x @ own[f"self_attn.{kind}_proj.weight"].T).view(len(elements), -1, setting.head_dim)
        for kind in ("q", "k", "v")
    )
    positions = [a + d for a, d in elements]
    mask = torch.tensor([[sees(query, key) for key in elements] for query in elements])
    attended = attend(rope(q, positions, setting), rope(k, positions, setting), v, mask)
    u = u + attended @ own["self_attn.o_proj.weight"].T
    return u + mlp(own, rms(u, own["post_attention_layernorm.weight"], setting.eps))


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
    inputs = torch.stack(raw)
    if setting.norm_before_fc:
        inputs = rms(inputs, weights["input_norm.weight"], setting.eps)
    u = inputs @ weights["fc.weight"].T
    for index in range(setting.num_layers):
        token = None if index else setting.embedding[tokens]
        u = layer_output(weights_of(weights, f"layers.{index}."), u, token, elements, setting)
    return dict(zip(elements, rms(u, weights["norm.weight"], setting.eps), strict=True))


def dense_peagle(
    weights: dict[str, Tensor], documents: list[Document], setting: Setting, reached: list[int]
) -> Result:
    """Loss of the documents as one global batch, with metrics."""
    guesses, kept = setting.num_guesses, torch.tensor(setting.kept)
    total = torch.zeros((), dtype=setting.embedding.dtype)
    zeros = [0] * guesses
    sums = [[0.0] * guesses for _ in range(5)]
    result = Result(total, [*zeros], [*zeros], *sums[:2], [*zeros], reached, *sums[2:])
    for document in documents:
        if not document.elements:
            continue
        states, agreeing = element_states(weights, document, setting), set[tuple[int, int]]()
        followed = set[tuple[int, int]]()
        teacher = setting.teacher_logits(document)
        for a, d in sorted(document.elements):
            logits, z = states[a, d] @ weights["lm_head.weight"].T, teacher[a + 1 + d]
            value, alpha = row_loss(setting.loss, logits, z, kept)
            if int(z.argmax()) in setting.kept:
                total = total + value
                result.guess_loss[d] += float(value.detach())
            guess = int(kept[logits.argmax()])
            agreed = guess == int(z.argmax())
            chance = float(z.softmax(0)[guess])
            result.chance[d] += chance
            if d == 0 or (a, d - 1) in followed:
                result.prefixes_t1[d] += chance
                if guess == int(document.ids[a + 2 + d]):
                    followed.add((a, d))
                    result.prefixes_data[d] += 1
            result.counted[d] += 1
            result.agreed[d] += agreed
            result.acceptance[d] += float(alpha.detach())
            if agreed and (d == 0 or (a, d - 1) in agreeing):
                agreeing.add((a, d))
                result.prefixes[d] += 1
    result.loss = total / max(1, sum(result.counted))
    return result
