"""Write parts of messages: counts with their nouns, and values from outside, shortened and escaped."""

from __future__ import annotations

import re

_USER = re.compile(r"//[^\s'\"]{0,500}@")
_VALUE = 200
_LINE = 1950  # so a line has less than 2,000 with the command's name
_TAIL = 300  # the end of a message, which says what to do, is kept


def shown(value: object) -> str:
    """Return a value as text for a message: about 200 characters at most, a URL without its password."""
    return shortened(_USER.sub("//…@", repr(value)), _VALUE)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 token``, ``2 tokens``. ``plural``: an irregular plural."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def shortened(text: str, longest: int) -> str:
    """Return ``text``, with its middle left out if it has more than ``longest`` characters."""
    if len(text) <= longest:
        return text
    tail = min(_TAIL, longest // 4)
    return f"{text[: longest - tail - 3]}...{text[len(text) - tail :]}"


def printable(text: str) -> str:
    r"""Return ``text`` with control characters, except line breaks, written as escapes such as ``\x1b``."""
    return "".join(
        character if character.isprintable() or character == "\n" else _escaped(character)
        for character in text
    )


def one_line(text: str) -> str:
    """Return a message as the terminal shows it: one printable line of less than 2,000 characters."""
    return shortened(printable(" ".join(text.split())), _LINE)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
