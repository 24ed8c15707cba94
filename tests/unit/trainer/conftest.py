"""Small data sets, schedules and resolved runs for the application's modules."""

import json
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_trainer.data.dataset import Dataset, Sample
from spec_trainer.data.report import DataReport
from spec_trainer.plan.resolve import resolve
from spec_trainer.run.batch_schedule import BatchSchedule, BatchSettings


@pytest.fixture
def make_schedule() -> Callable[..., BatchSchedule]:
    """``make_schedule(lengths, held_out=(), sample_flops=None, **settings)``: of a data set in file order;
    sample ``i`` holds the ids 100·i, 100·i + 1, …, of which the first is not supervised."""

    def make(
        lengths: Sequence[int],
        held_out: Sequence[int] = (),
        sample_flops: Callable[[int, int], int] | None = None,
        **settings: Any,
    ) -> BatchSchedule:
        samples = [_sample(number, length) for number, length in enumerate([*lengths, *held_out])]
        train, rest = samples[: len(lengths)], samples[len(lengths) :]
        defaults = {
            "global_batch_tokens": 20, "shuffle": False, "seed": 0, "data_parallel_ranks": (0,),
            "accumulation": 1, "balance": "cost", "capture_tokens": 100, "total_steps": None, "epochs": 1,
            "eval_every": 0,
        }  # fmt: skip
        dataset = Dataset(tuple(train), tuple(rest), DataReport())
        if "ranks" in settings:
            settings["data_parallel_ranks"] = tuple(range(settings.pop("ranks")))
        return BatchSchedule(dataset, BatchSettings(**{**defaults, **settings}), sample_flops=sample_flops)

    return make


def _sample(number: int, length: int) -> Sample:
    return Sample(
        number, np.arange(100 * number, 100 * number + length, dtype=np.int32), np.arange(length) > 0
    )


@pytest.fixture
def words(tiny_llama: Path, tmp_path: Path) -> list[str]:
    """Overrides that a run of 20 samples of 10 tokens needs; its output does not exist yet."""
    row = {"input_ids": list(range(3, 13)), "loss_mask": [0, 0] + [1] * 8}
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({**row, "input_ids": [n, *row["input_ids"][1:]]}) + "\n" for n in range(20))
    )
    return [f"target={tiny_llama}", f"data.path={file}", f"output={tmp_path / 'out'}", "train.steps=2"]


@pytest.fixture
def resolved(words: list[str]) -> Callable[..., Any]:
    """``resolved(*overrides)``: that run, resolved."""
    return lambda *overrides: resolve(None, {}, [*words, *overrides])


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """``with full_disk():`` the kernel refuses to let any file grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextmanager
    def limited() -> Iterator[None]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
