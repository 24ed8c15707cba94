"""Encode capture requests in their names, which are all that SGLang passes to the forward pass."""

from __future__ import annotations

import re
from typing import NamedTuple

GENERATED = "spec-generate-"
"""Beginning of the names of requests that are answered, not captured."""
_NAME = re.compile(r"spec-capture-(\d+)-(\d+)-([\d.]*)(?:-\d+)?")


class Assignment(NamedTuple):
    """A captured request's id, number of tokens and destinations, which the forward pass needs."""

    request_id: int
    num_tokens: int
    destinations: tuple[str, ...]
    """Short names of the request's destinations; each is a number."""


def name_of(assignment: Assignment, call: int = 0) -> str:
    """Return the request's name for SGLang.

    ``call``: the number of the capture, which keeps names distinct: SGLang refuses a name while it has not
    answered the previous request of this name. The states arrive before SGLang's answer, so the same request
    may be captured again before the answer.
    """
    places = ".".join(assignment.destinations)
    return f"spec-capture-{assignment.request_id}-{assignment.num_tokens}-{places}-{call}"


def read_name(name: str) -> Assignment | None:
    """Return the request id, length and destinations in a name; None if the request is not captured."""
    found = _NAME.fullmatch(name)
    return (
        Assignment(int(found[1]), int(found[2]), tuple(filter(None, found[3].split(".")))) if found else None
    )
