"""Colour text for terminals; NO_COLOR disables colours and FORCE_COLOR enables them everywhere."""

from __future__ import annotations

import os
from typing import TextIO

_GREEN, _PLAIN = "\x1b[1;32m", "\x1b[0m"


def takes_colours(stream: TextIO) -> bool:
    """Return whether to colour text on ``stream``, by https://no-color.org and https://force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def green(text: str) -> str:
    """Return ``text`` in green. Each line is coloured separately, as pagers such as ``less -R`` require."""
    return "\n".join(f"{_GREEN}{line}{_PLAIN}" if line else line for line in text.split("\n"))
