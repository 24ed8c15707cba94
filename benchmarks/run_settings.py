"""Settings in which whole runs are measured, with goals for Qwen3-8B's shapes on one H200.

An H200 makes 790 TFLOP/s in bfloat16.

``SETTINGS`` are fields of ``trainer_step.Case``: one step's work of one trainer rank.
"""

from __future__ import annotations

from typing import Any

from peer_shapes import TARGET
from random_target import SHAPES

SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft": "eagle3", "tokens": 2048, "sequences": 4},
    "dflash": {"draft": "dflash", "tokens": 2048, "sequences": 1, "passes": 4, "num_anchors": 512},
    "specforge": {"draft": "dflash", "tokens": 550, "sequences": 2, "passes": 2, "num_anchors": 256},
    "dspark": {
        "draft": "dspark",
        "block_size": 7,
        "tokens": 2048,
        "sequences": 1,
        "passes": 4,
        "num_anchors": 512,
    },
    "dflash2": {
        "draft": "dflash2",
        "block_size": 8,
        "tokens": 2048,
        "sequences": 1,
        "passes": 4,
        "num_anchors": 512,
    },
    "mtp": {"draft": "mtp", "num_steps": 3, "tokens": 2048, "sequences": 4},
    "peagle": {"draft": "peagle", "tokens": 2048, "sequences": 4},
}
TOY: dict[str, Any] = {
    "draft_vocab_size": 128,
    "num_steps": 2,
    "block_size": 4,
    "num_layers": 2,
    "num_anchors": 8,
    "tokens": 48,
    "dtype": "float32",
    "warmup": 2,
    "threads": 1,
    "peak_tflops": None,
    "repeats": 3,
}

SHARED = {"efficiency": 0.92, "data_wait_share": 0.02}
GOALS: dict[str, dict[str, float]] = {
    "eagle3": {"tokens_per_s": 17_000, **SHARED},
    "dflash": {"samples_per_s": 4.6, **SHARED},
    "specforge": {"samples_per_s": 11, **SHARED},
}
"""Goals per GPU, colocated. ``data_wait_share`` is an upper bound, the others are lower bounds."""
LIMITS: dict[str, dict[str, float]] = {
    "eagle3": {"tokens_per_s": 28_000},
    "dflash": {"samples_per_s": 8.0},
    "specforge": {"samples_per_s": 18.5},
}
"""Limits per GPU, colocated, that necessary matrix products alone set."""
PEERS: dict[str, dict[str, float]] = {
    "eagle3": {"TorchSpec colocated, 2 x H100: samples_per_s": 6.6},
    "dflash": {"TorchSpec colocated, 2 x H100: samples_per_s": 3.75},
    "specforge": {"SpecForge disaggregated, 8 x H200, Domino: samples_per_s": 6.3},
}
"""Figures that other projects published, per GPU."""


def case_fields(setting: str, shape: str) -> dict[str, Any]:
    """Return fields of ``trainer_step.Case`` for a target of ``shape``."""
    sizes = {name: SHAPES[shape][name] for name in ("hidden_size", "head_dim", "vocab_size")}
    small = TOY if shape == "toy" else {}
    return TARGET | SETTINGS[setting] | sizes | small


def beside_goals(setting: str, figures: dict[str, float]) -> dict[str, Any]:
    """Return ``figures`` per device beside goals, limits and the peers' figures, where a setting has them."""
    if setting not in GOALS:
        return {}
    rows = [
        {"figure": name, "value": figures[name], "goal": goal, "reached": _reached(name, figures[name], goal)}
        for name, goal in GOALS[setting].items()
        if name in figures
    ]
    return {"goals": rows, "limits": LIMITS[setting], "peers": PEERS[setting]}


def _reached(name: str, value: float, goal: float) -> bool:
    return value <= goal if name == "data_wait_share" else value >= goal
