"""The elements of a JSON list with the line on which each starts, which ``json.loads`` does not tell."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from spec_core.foreign import cause

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPACE = re.compile(r"[ \t\r\n]*")
_raw_decode = json.JSONDecoder().raw_decode


def json_elements(text: str) -> Iterator[tuple[int, object]]:
    """Yields (line from 1, element) of a list, or of the list under "data" of an object.

    Raises JSONDecodeError, which names the line, where the text is neither.
    """
    position, line, counted = _list_start(text), 1, 0
    closed, position = _next(text, position, "]", optional=True)
    while not closed:
        start = _skip_space(text, position)
        line += text.count("\n", counted, start)
        counted = start
        element, position = _decode(text, start)
        yield line, element
        mark, position = _next(text, position, ",]")
        closed = mark == "]"
    if (end := _skip_space(text, position)) != len(text) and text.lstrip()[0] == "[":
        raise json.JSONDecodeError("text after the end of the list", text, end)


def _decode(text: str, start: int) -> tuple[object, int]:
    try:
        return _raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of too many digits, a value nested too deeply
        raise json.JSONDecodeError(cause(error), text, start) from error


def _list_start(text: str) -> int:
    """The position after the opening bracket of the list of rows."""
    mark, position = _next(text, 0, "[{")
    while mark != "[":
        key, position = _decode(text, _skip_space(text, position))
        _, position = _next(text, position, ":")
        if key == "data":
            return _next(text, position, "[")[1]
        _, position = _decode(text, _skip_space(text, position))
        _, position = _next(text, position, ",")
    return position


def _next(text: str, position: int, expected: str, *, optional: bool = False) -> tuple[str, int]:
    """The next character other than white space, which must be one of ``expected``, and the position after it."""
    position = _skip_space(text, position)
    if text[position : position + 1] and text[position] in expected:
        return text[position], position + 1
    if optional:
        return "", position
    raise json.JSONDecodeError(f"expected {' or '.join(map(repr, expected))}", text, position)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()
