"""Validate the arguments of an engine's program that a user sets in section ``engine``."""

from __future__ import annotations

from typing import Any

from pydantic import AfterValidator


def unreserved(reserved: frozenset[str], spreading: frozenset[str] = frozenset()) -> AfterValidator:
    """Return a validator of a dict of arguments that refuses the names in ``reserved`` and ``spreading``.

    Arguments in ``spreading`` make a program distribute the states of one request over several processes.
    """

    def check(args: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(spreading & args.keys()):
            raise ValueError(
                f"{', '.join(taken)} cannot be set here: one process must hold all layers and rows of a request that "
                "is captured; use engine.tensor_parallel for a large target, engine.replicas for more speed"
            )
        if taken := sorted(reserved & args.keys()):
            raise ValueError(
                f"{', '.join(taken)} cannot be set here: the engine sets or forbids it; remove it"
            )
        return args

    return AfterValidator(check)
