"""Distances of served states from a prefill by Transformers in float32, row by row; ``serving_capture.py``."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("state-distances")

MOST_TIMES = 2.0
"""A row may be so many times as far from float32 as Transformers' row in bfloat16."""
BATCH = 16


class Reference:
    """Transformers, without a cache."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        attention = "eager" if dtype == torch.float32 else "sdpa"
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention
        )
        self._model, self._final = model.model.eval().to(device), []
        self._model.norm.register_forward_pre_hook(lambda _, args: self._final.append(args[0]))

    @torch.no_grad()
    def states(self, ids_BT: torch.Tensor, layers) -> torch.Tensor:
        """Return the states [B, T, N, H] of some layers. Attention is causal, so padding at the end is harmless."""
        self._final.clear()
        hidden = self._model(ids_BT, output_hidden_states=True, use_cache=False).hidden_states
        return torch.stack([[*hidden[:-1], self._final[0]][layer] for layer in layers], 2)


def compare(target: Path, complete, schema, device: torch.device) -> dict[str, Any]:
    """Compare all rows with Transformers; see the head of this file."""
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = Reference(target, torch.float32, device)
    rounded = Reference(target, torch.bfloat16, device)
    order = sorted(range(len(complete)), key=lambda number: len(complete[number][0]))
    parts: dict[str, list[torch.Tensor]] = {"served": [], "transformers": [], "shifted": []}
    places: list[tuple[int, int]] = []
    logged_s = time.monotonic()
    for first in range(0, len(order), BATCH):
        batch = order[first : first + BATCH]
        ids_BT = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(complete[number][0]) for number in batch], True
        ).to(device)
        expected, near = (one.states(ids_BT, schema.layers).float() for one in (exact, rounded))
        for row, number in enumerate(batch):
            served = complete[number][2].to(device).float()
            length = len(served)
            theirs = expected[row, :length]
            parts["served"].append(distances(served, theirs))
            parts["transformers"].append(distances(near[row, :length], theirs))
            shifted = distances(served[:-1], theirs[1:])
            parts["shifted"].append(torch.cat([torch.full_like(shifted[:1], torch.inf), shifted]))
            places += [(number, position) for position in range(length)]
        if time.monotonic() > logged_s + 5:
            logged_s = time.monotonic()
            log.info("%d of %d requests are compared", first, len(order))
    joined = {name: torch.cat(part) for name, part in parts.items()}
    return judged(joined, places, complete, schema)


def distances(found_TNH: torch.Tensor, expected_TNH: torch.Tensor) -> torch.Tensor:
    """Return |a - b| / |b| of each row, for each layer: [T, N] on the host."""
    return ((found_TNH - expected_TNH).norm(dim=2) / expected_TNH.norm(dim=2)).cpu()


def judged(parts: dict[str, torch.Tensor], places, complete, schema) -> dict[str, Any]:
    served, theirs = parts["served"], parts["transformers"]
    limit = MOST_TIMES * theirs.maximum(quantile(theirs, 0.99))
    ratio = served / theirs.clamp(min=1e-6)

    def place(index: int) -> dict[str, Any]:
        row, layer = divmod(index, len(schema.layers))
        number, position = places[row]
        ids, prompt_length, _ = complete[number]
        figures = {name: float(part[row, layer]) for name, part in parts.items()}
        at = {"request": number, "position": position, "layer": schema.layers[layer]}
        return {**at, "prompt_tokens": prompt_length, "tokens": len(ids), **figures}

    shares = {"50 %": 0.5, "99 %": 0.99, "100 %": 1.0}
    lows = {"0 %": 0.0, "1 %": 0.01, "50 %": 0.5}
    return {
        "rows": len(served),
        "generated_rows": sum(position >= complete[number][1] for number, position in places),
        "distances": {
            str(layer): {
                name: {key: float(quantile(part, share)[column]) for key, share in kinds.items()}
                for name, part, kinds in (
                    ("served", served, shares), ("transformers", theirs, shares), ("shifted", parts["shifted"], lows)
                )
            }
            for column, layer in enumerate(schema.layers)
        },
        "far_rows": int((served > limit).any(1).sum()),
        "far": [place(int(index)) for index in (served > limit).flatten().nonzero()[:8, 0]],
        "worst": place(int(served.argmax())),
        "worst_ratio": {**place(int(ratio.argmax())), "ratio": float(ratio.max())},
    }  # fmt: skip


def quantile(part: torch.Tensor, share: float) -> torch.Tensor:
    """Return the quantile of each column. torch.quantile takes fewer rows."""
    return part.sort(0).values[min(len(part) - 1, int(share * len(part)))]
