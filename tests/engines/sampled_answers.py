"""Judge whether sampled answers follow a distribution, by Kolmogorov's test for each token of the answer.

``kolmogorov_distances`` compares with the target in float32.
``own_distances`` compares with the logits that the server itself computed, as ``spec_vllm_sampler`` has recorded
them. So it tests the sampler alone: rounding in the server's dtype cannot fail it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from spec_testing import TransformersTarget


def kolmogorov_distances(
    target: TransformersTarget, prompt: Sequence[int], answers: Sequence[Sequence[int]], temperature: float
) -> list[float]:
    """Return sqrt(n) times Kolmogorov's distance for each token of n answers of one length to ``prompt``.

    The probability of all tokens likelier than the sampled one, plus a random share of its own, is uniform on [0, 1)
    if and only if tokens are sampled from the target at ``temperature``.
    """
    return [_distance(values) for values in _ranks(target, prompt, answers, temperature).T]


def own_distances(
    target: TransformersTarget, prompt: Sequence[int], records: Path, temperature: float, length: int
) -> dict[str, list[float]]:
    """Return the distances of sampled tokens from the server's own logits, for each of ``length`` tokens.

    ``raw`` divides the model's logits by ``temperature`` in float64. ``processed`` takes the logits as the sampling
    kernels saw them, if they were recorded. ``computed`` tests no sampled token: it is how far the raw logits are
    from the target in float32, in the same unit. ``processed_computed`` is the same for the processed logits.
    """
    answers = [steps[:length] for steps in _recorded(records).values() if len(steps) >= length]
    found = defaultdict(list)
    for place in range(length):
        steps = [answer[place] for answer in answers]
        tokens_B = torch.tensor([step["token"] for step in steps])
        prefixes = [tuple(step["token"] for step in answer[:place]) for answer in answers]
        expected_BV = (_logits(target, prompt, prefixes) / temperature).softmax(-1)
        share_B = torch.rand(len(steps), generator=torch.Generator().manual_seed(11 + place))
        own = {"": torch.stack([step["raw"] for step in steps]).double() / temperature}
        if "processed" in steps[0]:
            own["processed"] = torch.stack([step["processed"] for step in steps]).double()
        for name, logits_BV in own.items():
            probs_BV = logits_BV.softmax(-1)
            found[name or "raw"].append(_distance(_rank(probs_BV, tokens_B, share_B)))
            found[f"{name}_computed".strip("_")].append(_shift(expected_BV, probs_BV) * len(steps) ** 0.5)
    return dict(found)


def _ranks(target, prompt, answers, temperature: float) -> torch.Tensor:
    tokens_BT = torch.tensor([list(answer) for answer in answers])
    share_BT = torch.rand(tokens_BT.shape, generator=torch.Generator().manual_seed(5))
    ranks = []
    for place in range(tokens_BT.shape[1]):
        prefixes = [tuple(answer[:place]) for answer in answers]
        probs_BV = (_logits(target, prompt, prefixes) / temperature).softmax(-1)
        ranks.append(_rank(probs_BV, tokens_BT[:, place], share_BT[:, place]))
    return torch.stack(ranks, 1)


@torch.no_grad()
def _logits(target, prompt, prefixes: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Return the logits behind each prefix, all of one length, in float64; equal prefixes are computed once."""
    places = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
    tokens_UT = torch.tensor([[*prompt, *prefix] for prefix in places])
    logits_UV = torch.cat([target.model(part).logits[:, -1] for part in tokens_UT.split(500)])
    return logits_UV[[places[prefix] for prefix in prefixes]].double()


def _rank(probs_BV: torch.Tensor, tokens_B: torch.Tensor, share_B: torch.Tensor) -> torch.Tensor:
    """Return the probability of all likelier tokens, and a share of the tokens as likely as the sampled one.

    In bfloat16 many tokens are as likely as another one.
    """
    own_B1 = probs_BV.gather(1, tokens_B[:, None])
    likelier_B = probs_BV.where(probs_BV > own_B1, 0).sum(-1)
    return likelier_B + probs_BV.where(probs_BV == own_B1, 0).sum(-1) * share_B


def _distance(values_B: torch.Tensor) -> float:
    uniform = (torch.arange(len(values_B)) + 0.5) / len(values_B)
    return float((values_B.sort()[0] - uniform).abs().max()) * len(values_B) ** 0.5


def _shift(expected_BV: torch.Tensor, probs_BV: torch.Tensor) -> float:
    """Return by how much the mean distribution of ranks under ``expected`` leaves the uniform one.

    Ranks have a density that is constant between the cumulative probabilities of ``expected``, likeliest token first.
    """
    pairs_UP, counts_U = torch.unique(torch.cat([expected_BV, probs_BV], 1), dim=0, return_counts=True)
    grid_G = torch.linspace(0, 1, 1001, dtype=torch.float64)
    total_G = torch.zeros_like(grid_G)
    for pairs_P, counts in zip(pairs_UP.split(200), counts_U.split(200), strict=True):
        expected, probs = pairs_P.chunk(2, dim=1)
        order = expected.argsort(descending=True)
        expected, probs = expected.gather(1, order), probs.gather(1, order)
        ends, reached = expected.cumsum(1), probs.cumsum(1)
        at = torch.searchsorted(ends, grid_G.repeat(len(ends), 1)).clamp(max=ends.shape[1] - 1)
        left = ((ends.gather(1, at) - grid_G) / expected.gather(1, at)).clamp(0, 1)
        total_G += counts.double() @ (reached.gather(1, at) - left * probs.gather(1, at))
    return float((total_G / counts_U.sum() - grid_G).abs().max())


def _recorded(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the steps of each recorded request in their order: its logits and its token."""
    answers = defaultdict(list)
    for step in _steps(folder):
        for i, request in enumerate(step["requests"]):
            first = step["starts"][i]
            for k, token in enumerate(step["tokens"][i].tolist()[: int(step["counts"][i])]):
                logits = {name: step[name][first + k] for name in ("raw", "processed") if name in step}
                answers[request].append({"token": token, **logits})
    return answers


def _steps(folder: Path) -> Iterable[dict[str, Any]]:
    for file in sorted(folder.glob("*.pt"), key=lambda file: int(file.stem)):
        yield from torch.load(file)
