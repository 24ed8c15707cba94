"""Shapes of small targets at which a step of each draft is measured, and limits for what is measured.

A small step shows what the host costs: the device needs little time for each operation that the host starts.
"""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 768,
    "head_dim": 64,
    "vocab_size": 49_152,
    "draft_vocab_size": 16_384,
    "num_steps": 7,
    "num_layers": 5,
    "num_anchors": 512,
    "unsupervised": 0.3,
    "peak_tflops": 790,
    "warmup": 4,
    "repeats": 10,
    "threads": 4,
    "profile": True,
}
_LONG, _SHORT = {"tokens": 2048, "sequences": 4}, {"tokens": 384, "sequences": 40}
_WIDER = {"hidden_size": 2048, "vocab_size": 128_256, "draft_vocab_size": 32_000}
_QWEN3_06B = {
    "hidden_size": 1024,
    "head_dim": 128,
    "num_heads": 16,
    "num_kv_heads": 8,
    "vocab_size": 151_936,
    "draft_vocab_size": 32_000,
}
SHAPES: dict[str, dict[str, Any]] = {
    "eagle3, H 768, 2048 x 4": {"draft": "eagle3", **_LONG},
    "eagle3, H 768, 384 x 40": {"draft": "eagle3", **_SHORT},
    "eagle3, H 2048, 2048 x 4": {"draft": "eagle3", **_WIDER, **_LONG},
    "eagle3, Qwen3-0.6B, 2048 x 4": {"draft": "eagle3", **_QWEN3_06B, **_LONG},
    "mtp, H 768, 3 steps, 2048 x 4": {"draft": "mtp", "num_steps": 3, **_LONG},
    "peagle, H 768, 2048 x 4": {"draft": "peagle", **_LONG},
    "dflash, H 768, blocks of 16, 2048 x 4": {"draft": "dflash", "block_size": 16, **_LONG},
    "dflash, Qwen3-0.6B, blocks of 16, 2048 x 4": {
        "draft": "dflash",
        "block_size": 16,
        **_QWEN3_06B,
        **_LONG,
    },
    "dflash2, H 768, blocks of 8, 2048 x 4": {"draft": "dflash2", "block_size": 8, **_LONG},
    "dspark, H 768, blocks of 7, 2048 x 4": {"draft": "dspark", "block_size": 7, **_LONG},
    "dspark, H 768, blocks of 7, 384 x 40": {"draft": "dspark", "block_size": 7, **_SHORT},
}
MOST_OVER_KERNELS = 1.15
"""Largest ratio of a step's time to the time of its kernels; above it the device waits for the host."""


def limits(rows: dict[str, dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return a limit for each row of an accelerator: what it is for, the value, and the largest allowed value."""
    return [
        (f"{name}: wall time over kernel time", row["wall_over_kernels"], MOST_OVER_KERNELS)
        for name, row in rows.items()
        if "wall_over_kernels" in row
    ]
