"""Prompts of an evaluation, from any file that training data may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import DataError
from spec_trainer.data.config import DataConfig
from spec_trainer.data.dataset import load_dataset
from spec_trainer.data.tokens import last_run

if TYPE_CHECKING:
    from pathlib import Path

    from spec_trainer.data.dataset import Sample


def load_prompts(path: Path, tokenizer_folder: Path, vocab_size: int, max_length: int) -> list[list[int]]:
    """Token ids of one prompt per row, in the file's order.

    Of a conversation, what comes before its last answer (the answer's header included); a row that is supervised
    from its first token on, plain text above all, is a prompt as a whole. Raises DataError.
    """
    config = DataConfig(path=str(path), eval_samples=0, max_length=max_length)
    dataset = load_dataset(config, tokenizer_folder, vocab_size)
    prompts = [prompt for sample in dataset.train if (prompt := _prompt(sample))]
    if not prompts:
        raise DataError(f"{path} holds no prompt")
    return prompts


def _prompt(sample: Sample) -> list[int]:
    answer = last_run(sample.loss_mask)
    start = int(answer.argmax()) if answer.any() else 0
    return sample.input_ids[: start or None].tolist()
