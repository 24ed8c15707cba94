"""A third party's strategy, installed from its wheel, trains a draft: its options and data-parallel ranks count."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("packaging")


@pytest.fixture
def train(run, clean_python, tiny_llama, tmp_path):
    """``train(output, *words)``: a short run."""
    rows = [{"input_ids": [n, *range(3, 13)], "loss_mask": [0] + [1] * 10} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def go(output: Path, *words: str) -> None:
        run(
            clean_python.with_name("spec-trainer"), f"target={tiny_llama}", f"data.path={tmp_path / 'rows.jsonl'}",
            f"output={output}", "train.global_batch_tokens=66", "train.schedule=constant", "draft.num_steps=2",
            *words, cwd=tmp_path,
        )  # fmt: skip

    return go


def test_two_processes_train_the_same_samples_and_give_the_losses_of_one(
    train, run, clean_python, losses_of, tmp_path
):
    """Two copies are one data-parallel rank, as the ranks of a tensor-parallel group are. They resume, too."""
    ours, theirs = tmp_path / "fsdp", tmp_path / "replicated"
    train(ours, "train.steps=4")
    two = ["placement.kind=disaggregated", "train.ranks=2", "strategy.name=replicated", "strategy.copies=2"]
    for steps in (2, 4):
        train(theirs, f"train.steps={steps}", *two)
    assert losses_of(theirs) == pytest.approx(losses_of(ours), rel=1e-5)
    assert [file.name for file in (theirs / "logs").glob("trained-*")] == ["trained-0.jsonl"]
    config = yaml.safe_load((theirs / "config.yaml").read_text())
    assert config["strategy"] == {"name": "replicated", "bucket_mib": 25, "copies": 2}
    exported = tmp_path / "exported"
    command = clean_python.with_name("spec-trainer")
    run(command, "export", "--checkpoint", theirs / "checkpoints/step-4", "--output", exported)
    weights = "model.safetensors"
    assert (exported / weights).read_bytes() == (theirs / "draft" / weights).read_bytes()
