"""Rows of data, and what a folder holds, for commands that are refused."""

import json
from pathlib import Path

ROW = json.dumps({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}) + "\n"
CHAT = (
    json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]})
    + "\n"
)
TEXT = json.dumps({"text": "hi yo"}) + "\n"


def tree(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
