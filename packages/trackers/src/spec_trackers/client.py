"""Check whether a tracker's client is installed, and store the id of a run at a service."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from spec_core.records import Availability


def client_installed(package: str) -> Availability:
    """Return whether ``package`` can be imported, without importing it."""
    if importlib.util.find_spec(package) is None:
        return Availability(ok=False, reason=f"{package} is not installed; pip install {package}")
    return Availability(ok=True)


def stored_run_id(folder: Path, service: str, make: Callable[[], str]) -> str:
    """Return the run's id at a service, stored in the run directory so that a resumed run has the same id.

    ``make`` makes the id if none is stored yet.
    """
    file = folder / f".{service}-id"
    if not file.exists():
        scratch = file.with_suffix(".new")
        scratch.write_text(make())
        scratch.rename(file)
    return file.read_text()
