"""Names of capture requests. A request's name is all that SGLang passes on to the forward pass."""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"spec-capture-(\d+)-(\d+)-([\d.]*)(?:-\d+)?")


class Assignment(NamedTuple):
    """A captured request's id, number of tokens and destinations, which the forward pass needs."""

    request_id: int
    num_tokens: int
    destinations: tuple[str, ...]
    """Short names of the request's destinations; each is a number."""


def name_of(assignment: Assignment, call: int = 0) -> str:
    """Return the request's name for SGLang, which refuses a name whose last request it has not yet answered.

    ``call``: number of the capture. States are there before SGLang's answer, so a request may come again by then.
    """
    places = ".".join(assignment.destinations)
    return f"spec-capture-{assignment.request_id}-{assignment.num_tokens}-{places}-{call}"


def read_name(name: str) -> Assignment | None:
    """Return the request id, length and destinations in a request's name; None if that request is not captured."""
    found = _NAME.fullmatch(name)
    return (
        Assignment(int(found[1]), int(found[2]), tuple(filter(None, found[3].split(".")))) if found else None
    )
