"""Which SGLang this engine was made for, and what differs between its versions. Imports nothing of it."""

from __future__ import annotations

import re
from importlib import metadata

from spec_core.records import Availability

Version = tuple[int, ...]

OLDEST: Version = (0, 5, 16)
NEWEST: Version = (0, 5, 23)
READS_DRAFT_CAUSALITY: Version = (0, 5, 23)
"""From here on, at the latest, a draft's ``is_causal`` and ``norm_before_fc`` are read; 0.5.16 does not know them."""


def installed_sglang() -> Version | None:
    """Release numbers of the installed SGLang; None where there is none."""
    try:
        return parsed(metadata.version("sglang"))
    except metadata.PackageNotFoundError:
        return None


def parsed(version: str) -> Version:
    """``0.5.16.post1`` is a 0.5.16."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def sglang_availability() -> Availability:
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return Availability(
            ok=False, reason=f"sglang is not installed; pip install 'sglang=={_text(OLDEST)}'"
        )
    versions = {"sglang": version}
    if OLDEST <= parsed(version) <= NEWEST:
        return Availability(ok=True, versions=versions)
    return Availability(
        ok=False,
        versions=versions,
        reason=f"sglang {version} is installed; this engine is tested with {_text(OLDEST)} to {_text(NEWEST)}: "
        f"pip install 'sglang>={_text(OLDEST)},<={_text(NEWEST)}'",
    )


def _text(version: Version) -> str:
    return ".".join(str(number) for number in version)
