"""Shapes of Qwen3-8B at which other projects' training steps were measured.

SpecForge a6b6b02, TorchSpec 6f21829, speculators c05b95b: on one H200 with torch 2.11, at the settings that they
recommend, without wrappers.
"""

from __future__ import annotations

from typing import Any

TARGET: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "head_dim": 128,
    "vocab_size": 151936,
    "draft_vocab_size": 32000,
    "num_steps": 7,
    "block_size": 16,
    "num_layers": 5,
    "unsupervised": 0.3,
    "peak_tflops": 790,
    "warmup": 4,
    "repeats": 10,
    "threads": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "eagle3, 2048 x 4": {"draft": "eagle3", "tokens": 2048, "sequences": 4},
    "eagle3, 2048 x 1": {"draft": "eagle3", "tokens": 2048, "sequences": 1},
    "dflash, 2048 x 1, 512 anchors": {"draft": "dflash", "tokens": 2048, "sequences": 1, "num_anchors": 512},
    "dflash, 768 x 2, 256 anchors": {"draft": "dflash", "tokens": 768, "sequences": 2, "num_anchors": 256},
}
PEERS: dict[str, dict[str, dict[str, float]]] = {
    "eagle3, 2048 x 4": {
        "SpecForge": {"wall_ms": 299.6, "mfu": 0.49, "peak_gb": 39},
        "TorchSpec": {"wall_ms": 308.0, "mfu": 0.48, "peak_gb": 33},
        "speculators": {"wall_ms": 284.2, "mfu": 0.45, "peak_gb": 31},
    },
    "eagle3, 2048 x 1": {
        "SpecForge": {"wall_ms": 99.1, "mfu": 0.37},
        "TorchSpec": {"wall_ms": 157.7, "mfu": 0.24},
        "speculators": {"wall_ms": 126.2, "mfu": 0.26},
    },
    "dflash, 2048 x 1, 512 anchors": {
        "SpecForge": {"wall_ms": 215.7, "mfu": 0.41, "peak_gb": 28},
        "TorchSpec": {"wall_ms": 193.7, "mfu": 0.46, "peak_gb": 40},
    },
    "dflash, 768 x 2, 256 anchors": {
        "SpecForge": {"wall_ms": 206.0, "mfu": 0.42},
        "TorchSpec": {"wall_ms": 190.1, "mfu": 0.45},
    },
}


def compared(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return ``row`` beside the peers' of the same shape; ``fastest_ratio``: the fastest peer's time over it."""
    peers = PEERS[name]
    fastest = min(peer["wall_ms"] for peer in peers.values())
    return {"row": row, "peers": peers, "fastest_ratio": fastest / row["wall_ms"]}
