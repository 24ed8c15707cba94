"""Read from the metadata of installed distributions which plugins there are; nothing is imported."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata

_OURS = re.compile(r"spec[-_]core\b", re.IGNORECASE)
"""Matches the start of this project's entry-point groups, also in the misspelling ``spec-core``."""


@dataclass(frozen=True, kw_only=True)
class PluginRecord:
    """One installed entry point, a row of ``spec-trainer plugins``."""

    kind: str
    name: str
    distribution: str
    version: str
    entry_point: metadata.EntryPoint

    @property
    def owner(self) -> str:
        """Name and version of the plugin's distribution, for messages."""
        return f"{self.distribution} {self.version}"

    @property
    def what(self) -> str:
        """Kind, name and distribution of the plugin, for messages."""
        return f"{self.kind} {self.name!r} of {self.owner}"


def plugin_records(group: str, kind: str) -> list[PluginRecord]:
    """Return the entry points of a group as plugins of the kind ``kind``, sorted by name, duplicates included."""
    # An editable install and its source folder can both be on the path: one distribution, listed once.
    records: dict[tuple[str, str, str], PluginRecord] = {}
    for record in entry_points():
        if record.kind == group:
            key = (record.name, record.distribution, record.entry_point.value)
            records.setdefault(key, replace(record, kind=kind))
    return [records[key] for key in sorted(records)]


def entry_points() -> tuple[PluginRecord, ...]:
    """Return every entry point in a group whose name begins with this project's name.

    ``PluginRecord.kind`` is the group's name. The result is cached: the metadata of all distributions is read
    again only if a folder of ``sys.path`` has changed.
    """
    return _read_entry_points(tuple((folder, _changed_at(folder)) for folder in sys.path))


@lru_cache(maxsize=1)
def _read_entry_points(_folders: tuple[tuple[str, int], ...]) -> tuple[PluginRecord, ...]:
    return tuple(
        PluginRecord(
            kind=point.group,
            name=point.name,
            distribution=distribution.name,
            version=distribution.version,
            entry_point=point,
        )
        for distribution in metadata.distributions()
        if _OURS.search(distribution.read_text("entry_points.txt") or "")
        for point in distribution.entry_points
        if _OURS.match(point.group)
    )


def _changed_at(folder: str) -> int:
    """Return the modification time of a folder of ``sys.path`` in nanoseconds; 0 if it does not exist."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0
