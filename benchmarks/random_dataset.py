"""Write samples of random tokens, distributed by Zipf's law, the last part of each supervised."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path


def write_random_dataset(
    file: Path, num_samples: int, num_tokens: int, vocab_size: int, answer: float
) -> Path:
    """Write the rows to ``file`` and return it; ``answer``: supervised share of each sample, at its end."""
    draw = np.random.default_rng(0)
    # The ranks spread over the ids: most supervised tokens have a row in a draft's smaller head.
    ids_by_rank = draw.permutation(vocab_size)
    weights = 1 / np.arange(1, vocab_size + 1)
    ids_NT = draw.choice(ids_by_rank, (num_samples, num_tokens), p=weights / weights.sum())
    question = round(num_tokens * (1 - answer))
    mask = question * [0] + (num_tokens - question) * [1]
    with file.open("w") as rows:
        for ids in ids_NT.tolist():
            rows.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    return file
