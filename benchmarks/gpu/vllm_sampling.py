"""Compare tokens that vLLM's sampling kernels draw on a GPU with exact probabilities. No test: run it by hand.

::

    python -m benchmarks.gpu.vllm_sampling > kernels.json        # vLLM 0.26, a minute on an H200

Each case draws from known logits, without a model or a server, as one of vLLM's two model runners does. Guesses of a
draft are the likeliest tokens (``greedy``, vLLM's default), independent draws, or draws with vLLM's own noise
(``probabilistic``); ``salted`` changes this noise as vLLM 0.29 does. A ``reduced`` draft has half of the vocabulary.
Each place of an answer gets ``z``, the chi-square statistic as a normal deviate, and ``ks``, sqrt(n) times
Kolmogorov's distance. A case passes if no |z| is above 4 and no ``ks`` above 1.95.

Shapes: R requests of a batch, K guesses, V tokens of the vocabulary.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from torch import Tensor

DEVICE = torch.device("cuda")
R, K, DRAWS = 4096, 3, 200_000
POSITION = 3
"""Position of the token before the first one that is drawn."""
SALT = 1 << 30
LARGEST_Z, LARGEST_KS = 4.0, 1.95
FEWEST = 500
"""A place that fewer tokens reached is not judged."""


def main() -> None:
    """Draw every case and print the document."""
    rows = [
        second_runner_plain(size, dtype, seeds)
        for seeds in ("sequential", "random")
        for dtype in (torch.float32, torch.bfloat16)
        for size in (97, 9000)
    ]
    kinds = ("greedy", "independent", "probabilistic", "probabilistic salted")
    rows += [
        second_runner_drafted(97, dtype, temperature, seeds, kind + reduced)
        for kind in kinds
        for reduced in ("", " reduced")
        for seeds in ("sequential", "random")
        for dtype, temperature in ((torch.float32, 0.4), (torch.float32, 1.0), (torch.bfloat16, 0.4))
    ]
    rows.append(second_runner_drafted(9000, torch.float32, 0.4, "random", "greedy"))
    rows += [
        first_runner_drafted(97, 0.4, seeds, kind)
        for kind in ("greedy", "independent", "probabilistic")
        for seeds in ("none", "sequential")
    ]
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


def logits_of(num: int, size: int, seed: int) -> Tensor:
    """Return the same random logits [num, size] for the same seed."""
    return (torch.randn(num, size, generator=torch.Generator().manual_seed(seed)) * 1.5).to(DEVICE)


def seeds_of(kind: str, first: int) -> Tensor:
    """Return a seed for each of R requests, int64."""
    if kind == "sequential":
        return torch.arange(first, first + R, device=DEVICE)
    return torch.randint(-(2**62), 2**62, (R,), generator=torch.Generator().manual_seed(first)).to(DEVICE)


def second_runner_plain(size: int, dtype: torch.dtype, kind: str, temperature: float = 0.4) -> dict:
    """Draw one token for each request without a draft; logits are divided by the temperature in ``dtype``."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample

    logits_V = logits_of(1, size, 1)[0].to(dtype)
    requests_R = torch.arange(R, dtype=torch.int32, device=DEVICE)
    temperatures_R = torch.full((R,), temperature, device=DEVICE)
    positions_R = torch.full((R,), POSITION, device=DEVICE)
    drawn = []
    for first in range(0, DRAWS, R):
        logits_RV = logits_V.expand(R, size).clone()
        apply_temperature(logits_RV, requests_R, temperatures_R)
        noise = (seeds_of(kind, first), positions_R)
        drawn.append(gumbel_sample(logits_RV, requests_R, temperatures_R, *noise, apply_temperature=False))
    exact_V = (logits_V.float() / temperature).to(dtype).double().softmax(-1)
    found = judged([torch.cat(drawn)], [exact_V])
    return {"case": "second runner, no draft", "V": size, "dtype": str(dtype), "seeds": kind, **found}


def second_runner_drafted(size: int, dtype: torch.dtype, temperature: float, kind: str, guesses: str) -> dict:
    """Verify K guesses of each request; vLLM's speculator draws them with the seeds of their requests."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    target_KV, draft_KV = drafted_logits(size, guesses, dtype)
    requests_R = torch.arange(R, dtype=torch.int32, device=DEVICE)
    rows = requests_R.repeat_interleave(K + 1)
    offsets = torch.arange(K + 1, dtype=torch.int32, device=DEVICE).repeat(R)
    ends = torch.arange(0, R * (K + 1) + 1, K + 1, dtype=torch.int32, device=DEVICE)
    temperatures_R = torch.full((R,), temperature, device=DEVICE)
    positions = (POSITION + offsets.long()).contiguous()
    generator = torch.Generator(device=DEVICE).manual_seed(9)
    drawn, counts = [], []
    for first in range(0, DRAWS, R):
        seeds_R = seeds_of(kind, first)
        kept_RKV = torch.zeros(R, K, size, device=DEVICE) if "probabilistic" in guesses else None
        guesses_RK = torch.empty(R, K, dtype=torch.int64, device=DEVICE)
        for step in range(K):
            logits_RV = draft_KV[step].expand(R, size).clone()
            if kept_RKV is not None:
                at = POSITION + step + SALT * ("salted" in guesses)
                guesses_RK[:, step] = gumbel_sample(
                    logits_RV,
                    requests_R,
                    temperatures_R,
                    seeds_R,
                    torch.full((R,), at, device=DEVICE),
                    apply_temperature=True,
                    output_processed_logits=kept_RKV,
                    output_processed_logits_col=torch.tensor(step, device=DEVICE),
                )
            else:
                guesses_RK[:, step] = drawn_alone(logits_RV.float() / temperature, guesses, generator)
        zeros_R1 = torch.zeros(R, 1, dtype=torch.int64, device=DEVICE)
        inputs = torch.cat([zeros_R1, guesses_RK], 1).to(torch.int32).flatten()
        logits = target_KV.repeat(R, 1)
        apply_temperature(logits, rows, temperatures_R)
        tokens_RK, num_R = rejection_sample(
            logits,
            kept_RKV,
            inputs,
            ends,
            positions,
            requests_R,
            rows,
            offsets,
            temperatures_R,
            seeds_R,
            K,
            None,
            use_block_verification=False,
        )
        drawn.append(tokens_RK)
        counts.append(num_R)
    tokens, num = torch.cat(drawn), torch.cat(counts)
    exact = (target_KV.float() / temperature).to(dtype).double().softmax(-1)
    found = judged([tokens[num > place, place] for place in range(K + 1)], list(exact))
    case = {"case": f"second runner, {guesses}", "V": size, "dtype": str(dtype), "temperature": temperature}
    return {**case, "seeds": kind, "accepted": float(num.float().mean()) - 1, **found}


def first_runner_drafted(size: int, temperature: float, kind: str, guesses: str) -> dict:
    """Verify K guesses of each request with a generator for each request, or without (``none``)."""
    from vllm.v1.sample.rejection_sampler import rejection_sample

    target_KV, draft_KV = drafted_logits(size, guesses, torch.float32)
    target, draft = (target_KV / temperature).softmax(-1), (draft_KV / temperature).softmax(-1)
    ends = torch.arange(K, R * K + 1, K, dtype=torch.int32, device=DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(9)
    drawn = []
    for number in range(DRAWS // R if kind == "none" else DRAWS // R // 4):
        seeds = [] if kind == "none" else seeds_of(kind, number * R).tolist()
        own = {row: torch.Generator(device=DEVICE).manual_seed(seed) for row, seed in enumerate(seeds)}
        sampling = SimpleNamespace(
            all_greedy=False,
            all_random=True,
            temperature=torch.full((R,), temperature, device=DEVICE),
            generators=own,
        )
        guesses_KR = torch.stack(
            [drawn_alone(row.expand(R, size), guesses, generator) for row in draft_KV / temperature]
        )
        probs = draft.repeat(R, 1).contiguous() if guesses == "probabilistic" else None
        bonus = torch.multinomial(target[K], R, replacement=True, generator=generator)[:, None]
        logits = (target_KV[:K] / temperature).repeat(R, 1).contiguous()
        words = (guesses_KR.T.flatten().to(torch.int32), [K] * R, K, ends, probs, logits)
        drawn.append(rejection_sample(*words, bonus.to(torch.int32), sampling))
    tokens = torch.cat(drawn).long()
    found = judged([tokens[tokens[:, place] >= 0, place] for place in range(K + 1)], list(target))
    case = {"case": f"first runner, {guesses}", "V": size, "temperature": temperature, "seeds": kind}
    return {**case, "accepted": float((tokens >= 0).sum(-1).float().mean()) - 1, **found}


def drafted_logits(size: int, guesses: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits of the target [K + 1, V] and of a draft near it [K, V]."""
    target = logits_of(K + 1, size, 2).to(dtype)
    noise = 0.2 if "greedy" in guesses else 0.5
    draft = (target[:K].float() + noise * logits_of(K, size, 3)).to(dtype)
    if "reduced" in guesses:
        draft[:, size // 2 :] = float("-inf")
    return target, draft


def drawn_alone(logits_RV: Tensor, guesses: str, generator: torch.Generator) -> Tensor:
    """Return a guess of each row: the likeliest token, or one that is drawn by a generator of its own."""
    if "greedy" in guesses:
        return logits_RV.argmax(-1)
    return torch.multinomial(logits_RV.softmax(-1), 1, generator=generator)[:, 0]


def judged(tokens: list[Tensor], exact: list[Tensor]) -> dict:
    """Return the statistics of the tokens at each place that is judged, and whether all are within the limits."""
    reached = [(some, probs) for some, probs in zip(tokens, exact, strict=True) if len(some) >= FEWEST]
    places = [_statistics(some, probs) for some, probs in reached]
    passes = all(abs(row["z"]) <= LARGEST_Z and row["ks"] <= LARGEST_KS for row in places)
    return {"passes": passes and not any(row["impossible"] for row in places), "places": places}


def _statistics(tokens: Tensor, probs_V: Tensor) -> dict[str, float]:
    """Return ``z`` and ``ks`` of n tokens; tokens that are expected fewer than ten times count as one."""
    num, order = len(tokens), probs_V.argsort(descending=True)
    counts_V = torch.bincount(tokens, minlength=len(probs_V)).double()[order]
    probs_V = probs_V.double()[order] / probs_V.double().sum()
    is_often = probs_V * num >= 10
    seen = torch.cat([counts_V[is_often], counts_V[~is_often].sum()[None]])
    expected = torch.cat([probs_V[is_often], probs_V[~is_often].sum()[None]]) * num
    seen, expected = seen[expected > 0.5], expected[expected > 0.5]
    freedom = max(1, len(seen) - 1)
    return {
        "n": num,
        "z": float((((seen - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5),
        "ks": float((counts_V.cumsum(0) / num - probs_V.cumsum(0)).abs().max() * num**0.5),
        "impossible": int(counts_V[probs_V == 0].sum()),
    }


if __name__ == "__main__":
    sys.exit(main())
