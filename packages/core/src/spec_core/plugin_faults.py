"""Name the plugin in whose code an unforeseen error was raised, or whose method returns a wrong type."""

from __future__ import annotations

import traceback
from collections import defaultdict
from typing import TypeVar

from spec_core.draft import Draft
from spec_core.errors import PluginInvalid, SpecError
from spec_core.plugin_records import PluginRecord
from spec_core.plugins import kind_of, listed
from spec_core.wording import shown

T = TypeVar("T")


def raised_in(error: BaseException, application: str) -> str:
    """Return ", raised in " with the plugin whose code raised ``error``, for the end of a message.

    Libraries below the plugin's code are skipped, because their caller is more often at fault. The text is empty if
    the code is of the package ``application``, or if the error is this project's own, which says what is wrong.
    """
    if isinstance(error, SpecError):
        return ""
    plugins = _by_package()
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package == application:
            break
        if package in plugins:
            return f", raised in {_named(plugins[package], module)}"
    return ""


def checked_answer(answer: T, expected: type, plugin: Draft, method: str) -> T:
    """Return ``answer``, which ``plugin`` has returned from ``method``.

    Raise PluginInvalid, which names both, if it is not of the type ``expected``: None, if a method lacks its return.
    """
    if isinstance(answer, expected):
        return answer
    kind = kind_of(Draft)
    found = (record.what for record in listed() if (record.kind, record.name) == (kind, plugin.name))
    what = next(found, f"{kind} {plugin.name!r}")
    raise PluginInvalid(f"{what}: its {method} returned {shown(answer)}, expected {expected.__name__}")


def _by_package() -> dict[str, list[PluginRecord]]:
    found: dict[str, list[PluginRecord]] = defaultdict(list)
    for record in listed():
        found[record.entry_point.module.partition(".")[0]].append(record)
    return dict(found)


def _named(records: list[PluginRecord], module: str) -> str:
    """Return the plugin among ``records`` that has ``module``; their distribution if that is unclear."""
    nearest = [record for record in records if record.entry_point.module == module] or records
    return nearest[0].what if len(nearest) == 1 else f"a plugin of {nearest[0].owner}"
