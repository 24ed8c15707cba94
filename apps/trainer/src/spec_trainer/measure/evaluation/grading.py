"""Grade answers that are numbers or letters of choices by exact match, as in GSM8K and MMLU."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

LETTERS = string.ascii_uppercase[:8]
"""Letters of the choices of a question. There are no more, because I is a word."""
_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)
_LETTER = re.compile(rf"\b[{LETTERS}]\b", re.ASCII)


def right_answer(row: Mapping[str, Any]) -> Decimal | str | None:
    """Return the right answer of a row: the letter of a choice, or a number; None if the row has neither.

    A row with a list ``choices`` has the index of the right choice in ``answer``, as in MMLU, or its letter.
    """
    answer, choices = row.get("answer"), row.get("choices")
    if not isinstance(choices, list):
        return right_number(answer)
    letters = LETTERS[: len(choices)]
    if type(answer) is int and 0 <= answer < len(letters):
        return letters[answer]
    return answer if isinstance(answer, str) and answer in tuple(letters) else None


def right_number(answer: object) -> Decimal | None:
    """Return the number after ``####`` in a row's answer; None if the answer has no such number."""
    if not isinstance(answer, str) or "####" not in answer:
        return None
    return last_number(answer.rpartition("####")[2])


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, which may have commas between thousands; None if there is none."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def last_letter(text: str) -> str | None:
    """Return the last of ``LETTERS`` that stands alone in a text, such as B in ``(B)``; None if there is none."""
    letters = _LETTER.findall(text)
    return letters[-1] if letters else None


def accuracy(texts: Sequence[str], right: Sequence[Decimal | str | None]) -> float | None:
    """Return the share of texts whose last number, or last letter, is the right answer.

    Texts whose right answer is unknown (None in ``right``) are ignored. If all are ignored, return None.
    """
    graded = [
        (last_letter(text) if isinstance(answer, str) else last_number(text)) == answer
        for text, answer in zip(texts, right, strict=True)
        if answer is not None
    ]
    return sum(graded) / len(graded) if graded else None
