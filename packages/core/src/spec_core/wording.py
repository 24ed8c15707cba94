"""What a message may hold of foreign text: values cut short, and nothing that a terminal would obey."""

from __future__ import annotations

_VALUE = 200
_LINE = 1950  # with the command's name before it, less than 2,000
_TAIL = 300  # what to do comes last in a message, and stays


def shown(value: object) -> str:
    """Return a value as a message quotes it, at most about 200 characters of it."""
    return shortened(repr(value), _VALUE)


def shortened(text: str, longest: int) -> str:
    """Return ``text`` with its middle left out where it has more than ``longest`` characters."""
    if len(text) <= longest:
        return text
    tail = min(_TAIL, longest // 4)
    return f"{text[: longest - tail - 3]}...{text[len(text) - tail :]}"


def printable(text: str) -> str:
    """Return ``text`` with control characters, line breaks excepted, written as escapes such as ``\\x1b``."""
    return "".join(
        character if character.isprintable() or character == "\n" else _escaped(character)
        for character in text
    )


def one_line(text: str) -> str:
    """Return a message as a terminal gets it: one line, not too long, all of it printable."""
    return shortened(printable(" ".join(text.split())), _LINE)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
