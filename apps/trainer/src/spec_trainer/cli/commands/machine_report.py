"""``spec-trainer check`` without a backend: report hardware, installed packages and usable plugins."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import psutil

from spec_core import Backend, plugins
from spec_core.records import Capabilities
from spec_trainer.cli.commands.plugins import TableRow, plugin_rows

_COMMAND, _CORE = "spec-trainer", "spec-core"
_BYTES_OF_A_PARAMETER = 2
"""Bytes of one parameter in bfloat16."""
_WEIGHTS = 0.8
"""Share of an engine's memory that weights may take; the KV cache takes the rest."""


def describe_machine() -> dict[str, Any]:
    """Return facts about this machine for a bug report, JSON-serializable and without secrets."""
    rows = plugin_rows()
    packages = _packages(rows)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": _gib(psutil.virtual_memory().total),
        "free_memory_gib": _gib(psutil.virtual_memory().available),
        "free_disk_gib": {place: _gib(shutil.disk_usage(place).free) for place in _places()},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.endswith("VISIBLE_DEVICES") or name == "OMP_NUM_THREADS"
        },
        "packages": {name: version for name, version in packages.items() if version},
        "not_installed": [name for name, version in packages.items() if not version],
        "plugins": {
            f"{row['kind']} {row['name']}": ": ".join(
                filter(None, (str(row["status"]), str(row["reason"] or "")))
            )
            for row in rows
        },
        "fits": {
            str(row["name"]): _fits(str(row["name"]))
            for row in rows
            if row["kind"] == plugins.kind_of(Backend) and row["status"] == "ok"
        },
    }


def _packages(rows: Sequence[TableRow]) -> dict[str, str | None]:
    """Return package -> version (None if absent) of the packages that this project and plugins can use."""
    ours = {_COMMAND, _CORE, *(str(row["distribution"]) for row in rows)}
    named = {
        match[0]
        for distribution in ours
        for requirement in metadata.requires(distribution) or ()
        if (match := re.match(r"[\w.-]+", requirement))
    }
    return {name: _version(name) for name in sorted(named | ours, key=str.lower)}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _fits(name: str) -> dict[str, Any]:
    backend = plugins.load(Backend, name)
    capabilities = backend.capabilities()
    return {
        "versions": dict(backend.probe().versions),
        **asdict(capabilities),
        "dtypes": sorted(capabilities.dtypes),
        "largest_target": _largest_target(capabilities),
    }


def _largest_target(capabilities: Capabilities) -> str:
    if capabilities.device_bytes is None:
        shared = _billions(psutil.virtual_memory().total) / 2
        return f"about {shared:.1f} billion parameters in bfloat16 in half of this host's memory, beside a trainer"
    alone = _billions(capabilities.device_bytes - 2 * capabilities.process_bytes)
    return (
        f"about {alone:.0f} billion parameters in bfloat16 on a device of its own, {alone / 2:.0f} on one that it "
        "shares with a trainer, half each; `spec-trainer plan` says it exactly"
    )


def _billions(memory: float) -> float:
    return _WEIGHTS * memory / _BYTES_OF_A_PARAMETER / 1e9


def _places() -> list[str]:
    shared = "/dev/shm"
    return [os.getcwd(), tempfile.gettempdir(), *([shared] if os.path.isdir(shared) else [])]


def _gib(size: int) -> float:
    return round(size / 2**30, 1)
