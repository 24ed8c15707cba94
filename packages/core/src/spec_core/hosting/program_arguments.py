"""Arguments of a program that a user may set in section ``engine``."""

from __future__ import annotations

from typing import Any

from pydantic import AfterValidator


def unreserved(reserved: frozenset[str]) -> AfterValidator:
    """Return a validator of a mapping of arguments that refuses the ``reserved`` ones."""

    def check(args: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(reserved & args.keys()):
            raise ValueError(
                f"{', '.join(taken)} cannot be set here: the engine sets or forbids it; remove it"
            )
        return args

    return AfterValidator(check)
