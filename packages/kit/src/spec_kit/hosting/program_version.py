"""Find the installed version of a program from package metadata, since importing the program is slow."""

from __future__ import annotations

from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from spec_core.records import Availability


def installed_version(*distributions: str) -> tuple[str, str] | None:
    """Return name and version of the first of ``distributions`` that is installed; None if none is."""
    for name in distributions:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def probe_version(versions: str, *distributions: str, needed_by: str = "this engine") -> Availability:
    """Return whether a distribution is installed in one of ``versions``, such as ``>=0.26,<0.34``.

    ``needed_by``: the subject of the sentence that says which versions work.
    """
    found = installed_version(*distributions)
    if found is None:
        name = distributions[0]
        return Availability(ok=False, reason=f"{name} is not installed; pip install '{name}{versions}'")
    name, version = found
    try:
        fits = SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        fits = False
    reason = (
        f"{name} {version} is installed, {needed_by} works with {versions}; pip install '{name}{versions}'"
    )
    return Availability(ok=fits, reason="" if fits else reason, versions={name: version})
