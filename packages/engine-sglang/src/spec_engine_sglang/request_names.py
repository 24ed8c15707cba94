"""Names of capture requests. SGLang carries a request's name to the forward pass, and nothing else of ours."""

from __future__ import annotations

import re

_NAME = re.compile(r"spec-capture-(\d+)-(\d+)")


def name_of(key: int, num_tokens: int) -> str:
    return f"spec-capture-{key}-{num_tokens}"


def read_name(name: str) -> tuple[int, int] | None:
    """Key and number of tokens; None for a request that is not captured."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None
