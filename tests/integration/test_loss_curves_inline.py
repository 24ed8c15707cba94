"""How a global batch is cut must not show in the loss (one rule for all losses): whole runs, one process."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from spec_trainer.cli.commands.train import run_training
from spec_trainer.plan.resolve import resolve

from .run_directory import losses

STEPS = 30
GROUP = (20, 20, 12, 12)
"""Tokens of the four samples of a global batch; cut in two or four, every micro-batch has as many samples."""

Curve = list[float]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 groups: the steps see every sample more than twice. Masks have holes, three rows are not supervised."""
    draw = random.Random(0)
    successors = [draw.randrange(3, 97) for _ in range(97)]
    file = tmp_path_factory.mktemp("groups") / "rows.jsonl"
    with file.open("w") as out:
        for number in range(13 * len(GROUP)):
            ids = [draw.randrange(3, 97)]
            while len(ids) < sorted(GROUP, key=lambda _: number // 4 % 3 - 1)[number % 4]:
                ids.append(successors[ids[-1]])
            mask = [int(number % 17 != 5 and draw.random() < 0.8) for _ in ids]
            out.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    return file


@pytest.fixture(scope="module")
def curve(
    peaked_target: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int, bool, int], Curve]:
    """(dtype, accumulation, packing, tokens of a forward pass of the target) -> the loss of every step."""

    @cache
    def train(dtype: str, accumulation: int, packing: bool, capture_tokens: int = 8192) -> Curve:
        words = {
            "target": peaked_target,
            "data.path": rows,
            "data.shuffle": False,
            "data.eval_samples": 0,
            "data.packing": packing,
            "output": tmp_path_factory.mktemp("run"),
            "train.dtype": dtype,
            "train.accumulation": accumulation,
            "train.global_batch_tokens": sum(GROUP),
            "train.steps": STEPS,
            "train.lr": 3e-3,
            "train.warmup_steps": 5,
            "draft.num_steps": 3,
            "engine.batch_tokens": capture_tokens,
        }
        run = resolve(None, {}, [f"{key}={value}" for key, value in words.items()])
        for item in map(run.schedule.train_item, range(STEPS)):
            (parts,) = run.schedule.shares(item)
            assert [len(part) for part in parts] == [4 // accumulation] * accumulation
        run_training(run)
        return losses(run.directory.root)

    return train


def largest_difference(one: Curve, other: Curve) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_falls_by_a_third(curve, dtype):
    found = curve(dtype, 1, True)
    assert len(found) == STEPS
    assert found[-1] < 0.7 * found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance", "micro_batch", "packing"),
    [
        ("float32", 1e-5, 1, True),
        ("float32", 1e-5, 2, True),
        ("float32", 1e-5, 1, False),
        ("float32", 1e-5, 2, False),
        ("float32", 1e-5, 4, False),
        ("bfloat16", 1e-3, 2, True),
        ("bfloat16", 1e-3, 1, False),
    ],
)
def test_cut_of_the_global_batch_does_not_show(curve, dtype, tolerance, micro_batch, packing):
    assert largest_difference(curve(dtype, 4 // micro_batch, packing), curve(dtype, 1, True)) < tolerance


def test_cut_of_the_targets_batches_does_not_show(curve):
    assert largest_difference(curve("float32", 1, True, 20), curve("float32", 1, True)) < 1e-5
