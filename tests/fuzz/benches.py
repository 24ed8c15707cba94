"""Cases of ``evaluate --bench``: names that lead elsewhere, and rows whose fields are odd."""

import json
import random
from pathlib import Path

from .damage import ODD_VALUES

_ROWS = {
    "gsm8k": {"question": "How many?", "answer": "It is #### 2"},
    "mmlu": {"question": "Which?", "choices": ["a", "b", "c", "d"], "answer": 1, "subject": "x"},
    "mt_bench": {"prompt": ["Say it.", "Say more."], "category": "x"},
}
_NAMES = [
    "../gsm8k", "/gsm8k", "gsm8k/../gsm8k", "gsm8k:0", "gsm8k:-1", "gsm8k:x", "gsm8k:" + "9" * 30, ",", "x",
    "gsm8k:1:1",
]  # fmt: skip
_ANSWERS = [9, -1, "Z", "a", "", None, 1.5, True, [1], 10**30]


def bench(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    """Draw a benchmark's name and its rows, one of which has an odd field, or lacks one."""
    name = draw.choice(list(_ROWS))
    rows = [dict(_ROWS[name]) for _ in range(3)]
    field = draw.choice(list(rows[0]))
    rows[1][field] = draw.choice(_ANSWERS if field == "answer" else ODD_VALUES)
    if draw.random() < 0.1:
        del rows[1][field]
    (folder / "rows").mkdir()
    for place in (folder, folder / "rows"):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = draw.choice(_NAMES) if draw.random() < 0.3 else f"{name}:{draw.choice([1, 2, 3])}"
    words = ["--target", root / "target", "--draft-model", root / "eagle3", "--bench", asked]
    rest = ["--bench-data", folder / "rows", "--max-new-tokens", 1, "--temperature", 0, "--no-untrained"]
    return f"{asked}: {field}={str(rows[1].get(field))[:40]}", ["evaluate", *words, *rest]
