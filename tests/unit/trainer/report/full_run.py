"""A run of which a report has everything."""

import json
from pathlib import Path

from spec_trainer.run.directory import RunDirectory


def write_rows(file: Path, *rows: dict) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def records(directory: RunDirectory) -> None:
    lines = [
        {
            "step": step,
            "loss": 5.0 / step,
            "acceptance_length": 1 + step / 10,
            "lr": 1e-3,
            "accuracy": [0.5, 0.25],
        }
        for step in range(1, 6)
    ]
    lines[-1] |= {"eval_loss": 1.5, "eval_acceptance_length": 1.4}
    write_rows(directory.metrics, *lines)


def full_summary() -> dict:
    return {
        "description": "a draft", "steps": 1234, "loss": 1.0, "wall_s": 75.2, "acceptance_length": 2.345,
        "acceptance_length_before": 1.0, "acceptance_length_bigram": 1.3, "acceptance_length_prompt_lookup": 1.1,
        "tokens_per_s": 300.0, "tokens_per_s_without_draft": 200.0, "outputs_equal": True,
        "throughput": [{"concurrency": 8, "tokens_per_s": 1111.0, "tokens_per_s_without_draft": 99.0}],
        "acceptance_per_position": [0.7, 0.4], "time_s": {"data": 25.0, "step": 75.0}, "num_draft_tokens": 2,
        "texts": [{"prompt": "<p>", "tokens": [{"text": "<em>", "place": 1, "refused": "<del>"}]}],
    }  # fmt: skip
