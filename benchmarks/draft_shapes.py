"""Shapes of Qwen3-8B at which a step of each draft is measured, and lengths of one document."""

from __future__ import annotations

from itertools import product
from typing import Any

DRAFTS: dict[str, dict[str, Any]] = {
    "eagle3, 2 layers, 2048 x 4": {
        "draft": "eagle3",
        "tokens": 2048,
        "sequences": 4,
        "options": ("num_layers=2",),
    },
    "eagle3, mla, 2048 x 4": {
        "draft": "eagle3",
        "tokens": 2048,
        "sequences": 4,
        "options": ("attention=mla",),
    },
    "mtp, 3 steps, 2048 x 4": {"draft": "mtp", "tokens": 2048, "sequences": 4, "num_steps": 3},
    "peagle, 4 layers, 2048 x 4": {"draft": "peagle", "tokens": 2048, "sequences": 4},
    "dspark, blocks of 7, 2048 x 1, 512 anchors": {
        "draft": "dspark",
        "block_size": 7,
        "tokens": 2048,
        "num_anchors": 512,
    },
    "dflash2, blocks of 8, 2048 x 1, 512 anchors": {
        "draft": "dflash2",
        "block_size": 8,
        "tokens": 2048,
        "num_anchors": 512,
    },
}
LENGTHENED: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "dflash": {},
    "dflash2": {"block_size": 8},
    "dspark": {"block_size": 7},
    "mtp": {"num_steps": 3},
    "peagle": {},
}
"""Drafts that have ``checkpoint_activations``, and their shapes where they are not the defaults."""
LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536)


def document_cases(lengths: tuple[int, ...]) -> dict[str, list[dict[str, Any]]]:
    """Return cases of one document of growing length, without and with ``checkpoint_activations``, of each draft."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for draft, recompute in product(LENGTHENED, (False, True)):
        name = f"{draft}, checkpoint_activations={str(recompute).lower()}"
        options = (f"checkpoint_activations={str(recompute).lower()}",)
        shape = {"draft": draft, "options": options, **LENGTHENED[draft]}
        cases[name] = [{**shape, "tokens": tokens} for tokens in lengths]
    return cases
