"""Read the prompts of an evaluation from any file format that training accepts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from spec_core.errors import DataError
from spec_trainer.configuration.chat import PromptConfig
from spec_trainer.data.dataset import Dataset
from spec_trainer.data.errors import BadRow
from spec_trainer.data.row_images import NO_PROMPT_IMAGES, ImageRules
from spec_trainer.data.rows import parse_row
from spec_trainer.data.sources import check_answers, read_rows
from spec_trainer.data.tokens import Encoder, last_run


def load_prompts(
    path: Path,
    tokenizer_folder: Path,
    vocab_size: int,
    max_length: int,
    chat: PromptConfig | None = None,
    images: ImageRules = NO_PROMPT_IMAGES,
) -> list[Sequence[int]]:
    """Return each row's prompt (``Encoder.prompt``), in the file's order.

    Raise DataError, with file and line, for a row whose prompt is empty or has more than ``max_length`` tokens.
    """
    chat = chat or PromptConfig()
    check_answers(str(path), chat)
    encoder = Encoder(tokenizer_folder, vocab_size, chat, images, chat.media_root)
    prompts: list[Sequence[int]] = []
    for row in read_rows(str(path)):
        try:
            prompts.append(encoder.prompt(parse_row(row.content, images.refused)))
        except BadRow as bad:
            raise DataError(f"{row.where}: {bad}") from bad
        if not 0 < len(prompts[-1]) <= max_length:
            raise DataError(
                f"{row.where}: a prompt of {len(prompts[-1])} tokens; 1 to {max_length} are possible: leave the row "
                "out, or lower --max-new-tokens"
            )
    if not prompts:
        raise DataError(f"{path} holds no prompt")
    return prompts


def serving_prompts(dataset: Dataset, longest: int, most: int) -> list[list[int]]:
    """Return at most ``most`` prompts of held-out samples, each of at most ``longest`` tokens.

    A conversation's prompt is in ``Dataset.questions``. Otherwise the prompt is all tokens before the last
    supervised span; a sample whose tokens are all supervised is cut to ``longest`` tokens.
    """
    prompts: list[list[int]] = []
    for sample, question in zip_longest(dataset.held_out, dataset.questions):
        start = int(last_run(sample.loss_mask).argmax())
        prompt = sample.input_ids[: start or longest] if question is None else question
        if len(prompt) <= longest:
            prompts.append(prompt.tolist())
    return prompts[:most]
