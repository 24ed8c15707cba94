"""Get the results of Ray's actors and tasks, and describe how workers ended."""

from __future__ import annotations

import signal
from typing import Any

from spec_core.errors import RunError, SpecError, first_line
from spec_processes import ending

UNKILLABLE_S = 10.0
"""Longest wait, in seconds, for a killed process to end. A process that hangs inside a driver does not
end."""


def result(reference: Any, who: str) -> Any:
    """Wait for the result of an actor's method or a task, and return it.

    If the method or task raised a SpecError, raise an error of the same type. For any other error, or if the actor
    or task died, raise RunError.
    """
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SpecError):
            raise type(cause)(f"{who}: {cause}") from error
        raise RunError(f"{who}: {type(cause).__name__}: {first_line(cause)}") from error
    except ray.exceptions.RayError as error:
        raise RunError(f"{who}: {_why(error)}") from error


def ending_of(code: Any) -> tuple[str, bool]:
    """Return how a worker has ended, and whether it was killed.

    ``code``: Ray reference to its return code.
    """
    import ray

    try:
        number = ray.get(code, timeout=UNKILLABLE_S)
    except ray.exceptions.GetTimeoutError:
        return "was lost: its connection has ended and it has not, or its host does not answer", False
    except ray.exceptions.RayTaskError as error:
        return f"did not start: {first_line(error.cause)}", False
    except ray.exceptions.RayError as error:
        return f"was lost with its Ray actor: {_why(error)}", True
    return ending(number), number == -signal.SIGKILL


def _why(error: Exception) -> str:
    """Return the cause from Ray's long error message."""
    text = " ".join(str(error).split())
    _, found, cause = text.partition("is dead because ")
    return cause.partition(".")[0] if found else text[:300]
