"""Grade answers whose right result is a number by exact match.

Rows of GSM8K give the right number after ``####``, at their end.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)


def right_number(answer: object) -> Decimal | None:
    """Return the number after ``####`` in a row's answer; None if the answer has no such number."""
    if not isinstance(answer, str) or "####" not in answer:
        return None
    return last_number(answer.rpartition("####")[2])


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, which may have commas between thousands; None if there is none."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def accuracy(texts: Sequence[str], right: Sequence[Decimal | None]) -> float | None:
    """Return the share of texts whose last number is the right number.

    Texts whose right number is unknown (None in ``right``) are ignored. If all are ignored, return None.
    """
    graded = [
        last_number(text) == number for text, number in zip(texts, right, strict=True) if number is not None
    ]
    return sum(graded) / len(graded) if graded else None
