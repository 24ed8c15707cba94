"""Warn of data whose answers never end with an end token of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spec_core.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spec_core import TargetSpec
    from spec_trainer.data.dataset import Sample


def end_token_warning(samples: Iterable[Sample], target: TargetSpec) -> str | None:
    """Return a warning if no sample with prompt and answer has an end token of the target; else None.

    In a conversation with the target's own template, every answer ends with such a token. Tokens of another model's
    tokenizer are often valid ids of the target, so no other check would notice them. Texts have no prompt and need
    no end token.
    """
    num_answered, ends = 0, target.eos_token_ids
    for sample in samples if ends else ():
        if sample.loss_mask.any() and not sample.loss_mask.all():
            if np.isin(sample.input_ids, ends).any():
                return None
            num_answered += 1
    if not num_answered:
        return None
    return (
        f"no answer ends as the target's do: {counted(num_answered, 'sample')} with a prompt and an answer, none "
        f"with an end token of the target ({', '.join(map(str, ends))}); the tokenizer or the chat template in "
        f"'{target.folder}' may be another model's, or answers were cut; spec-trainer plan --show 1 prints a sample"
    )
