"""How far sampled answers are from the target's own distribution: Kolmogorov's test for each token of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..transformers_target import Transformer


@torch.no_grad()
def kolmogorov_distances(
    target: Transformer, prompt: Sequence[int], answers: Sequence[Sequence[int]], temperature: float
) -> list[float]:
    """Return sqrt(n) times Kolmogorov's distance for each token of n answers of one length to ``prompt``.

    The probability of all tokens likelier than the sampled one, plus a random share of its own, is uniform on [0, 1)
    if and only if tokens are sampled from the target at ``temperature``.
    """
    tokens_BT = torch.tensor([[*prompt, *answer] for answer in answers])
    new_BT = tokens_BT[:, len(prompt) :]
    logits = [target.model(part).logits[:, len(prompt) - 1 : -1] for part in tokens_BT.split(500)]
    probs_BTV = (torch.cat(logits).double() / temperature).softmax(-1)
    own_BT1 = probs_BTV.gather(2, new_BT[..., None])
    draw = torch.rand(new_BT.shape, generator=torch.Generator().manual_seed(5))
    values_BT = probs_BTV.where(probs_BTV > own_BT1, 0).sum(-1) + own_BT1[..., 0] * draw
    uniform = (torch.arange(len(values_BT)) + 0.5) / len(values_BT)
    return [
        float((ordered - uniform).abs().max()) * len(values_BT) ** 0.5 for ordered in values_BT.sort(0)[0].T
    ]
