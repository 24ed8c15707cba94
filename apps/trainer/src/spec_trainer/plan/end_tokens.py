"""Warn of data whose answers never end with an end token of the target, or whose template's marks are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spec_core.wording import counted
from spec_trainer.data.chat import HEADER_MARKED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spec_core import TargetSpec
    from spec_trainer.data.dataset import Sample
    from spec_trainer.data.report import DataReport


def end_token_warning(samples: Iterable[Sample], target: TargetSpec) -> str | None:
    """Return a warning if no sample with prompt and answer has a supervised end token of the target; else None.

    In a conversation with the target's own template, every answer ends with such a token. Tokens of another model's
    tokenizer are often valid ids of the target, so no other check would notice them. Texts have no prompt and need
    no end token.
    """
    num_answered = 0
    num_behind = 0
    ends = target.eos_token_ids
    for sample in samples if ends else ():
        if sample.loss_mask.any() and not sample.loss_mask.all():
            is_end = np.isin(sample.input_ids, ends)
            if is_end[sample.loss_mask].any():
                return None
            num_answered += 1
            num_behind += bool((is_end[1:] & sample.loss_mask[:-1]).any())
    if not num_answered:
        return None
    return (
        f"no answer ends as the target's do: {counted(num_answered, 'sample')} with a prompt and an answer, none "
        f"with a supervised end token of the target ({', '.join(map(str, ends))}); {_cause(num_behind, target)}; "
        "spec-trainer plan --show 1 prints a sample"
    )


def _cause(num_behind: int, target: TargetSpec) -> str:
    if num_behind:
        return (
            f"{counted(num_behind, 'sample')} with such a token right behind the supervised tokens, so the draft "
            "does not learn where answers end: the {% generation %} marks of the chat template, or the rows' "
            "loss_mask, must hold the end of each turn"
        )
    return (
        f"the answers may all have been cut (spec-trainer regenerate --max-new-tokens), or the tokenizer or the chat "
        f"template in '{target.folder}' may be another model's"
    )


def marks_warning(report: DataReport) -> str | None:
    """Return a warning if the chat template marks text that the server writes before an answer; else None."""
    rows = report.notes.get(HEADER_MARKED)
    if rows is None:
        return None
    return (
        f"the draft learns text that the target never generates: {HEADER_MARKED}, in {counted(rows.count, 'row')} "
        f"(first: {rows.first}); begin them behind the generation prompt, or set data.chat_template to another"
    )
