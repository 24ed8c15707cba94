"""Runs whose own engine decodes, on a target of the quickstart's kind, made smaller."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_trainer.cli.quickstart import run as quickstart
from spec_trainer.cli.quickstart.tiny_target import TinyTargetConfig

from .. import launching, run_directory

EVERY, STEPS = 10, 30

SIZE = quickstart.QuickstartSize(
    target=TinyTargetConfig(
        vocab_size=400,
        num_layers=8,
        hidden_size=64,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=128,
        seq_len=128,
        steps=60,
        shallow_steps=0,
    ),
    library=Path(asyncio.__file__).parent,
)
CHAIN = {"draft__num_steps": 3}


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[launching.Lab]:
    """Prompts of 24 tokens, six of them held out; answers are greedy."""
    folder = tmp_path_factory.mktemp("decode")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        files = quickstart.prepare_files(SIZE)
    with lab_of(folder, files.target, files.train) as lab:
        yield lab


@pytest.fixture(scope="session")
def untrained(tmp_path_factory, make_target, rows_file: Path) -> launching.Lab:
    """The same on a target of random weights, for what is refused before anything is decoded."""
    target = make_target("llama", max_position_embeddings=512)
    return lab_of(tmp_path_factory.mktemp("untrained"), target, rows_file)


def lab_of(folder: Path, target: Path, rows: Path) -> launching.Lab:
    keys = {
        "target": target, "data.path": rows, "data.eval_samples": 6, "data.max_length": 24,
        "train.steps": STEPS, "train.lr": 5e-3, "optimizer.betas": "[0.8,0.95]", "train.warmup_steps": 3,
        "train.global_batch_tokens": 400, "train.push_every": EVERY, "decode.every": EVERY,
        "decode.prompts": 16, "decode.max_new_tokens": 24, "decode.temperature": 0,
        "decode.num_draft_tokens": 3,
    }  # fmt: skip
    return launching.Lab(folder, keys, "")


def lengths(output: Path) -> list[float]:
    """Return the acceptance length on held-out prompts at the beginning of every cycle, and at the end."""
    return [cycle["held_out_acceptance_length"] for cycle in run_directory.summary(output)["cycles"]]
