"""Find the errors that a program has written into its log."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ERROR = re.compile(r"\b((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)$")


def logged_errors(lines: Iterable[str]) -> list[str]:
    """Return the error at the end of each line that has one, such as ``ValueError: no such device``."""
    return [found[1] for line in lines if (found := _ERROR.search(line))]
