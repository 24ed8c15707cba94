"""A row of each benchmark, as the hub has them."""

import json
from pathlib import Path

ROWS = {
    "mt_bench": {"prompt_id": 1, "category": "math", "prompt": ["Who is it?", "Why so?"], "reference": []},
    "gsm8k": {"question": "Tom has 3 hens. How many?", "answer": "3\n#### 3"},
    "math500": {"problem": "Solve x = 1.", "solution": "1", "answer": "1"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def one():\n", "test": "", "entry_point": "one"},
}


def write_rows(folder: Path, repeated: int) -> None:
    """Write the rows as ``--bench-data`` takes them, each so often."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * repeated)
