"""A search for the tokens of a request in what a run has left and said."""

from pathlib import Path
from typing import Any

import torch

CANARY = [81, 60, 93, 52, 77, 85, 64, 59, 90, 71]
"""Tokens of a request, which nothing else has in this order."""


def is_said(tokens: list[int], output: Path, caplog: Any, capfd: Any) -> bool:
    """Whether a file of a run, its log or its output has these tokens."""
    said = capfd.readouterr()
    texts = [caplog.text.encode(), said.out.encode(), said.err.encode()]
    needles = [separator.join(map(str, tokens)).encode() for separator in (",", ", ", " ", "\n")]
    needles += [torch.tensor(tokens, dtype=dtype).numpy().tobytes() for dtype in (torch.int32, torch.int64)]
    texts += [file.read_bytes() for file in files(output)]
    return any(needle in text for text in texts for needle in needles)


def files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]
