"""Find the installed draft plugin that can read an exported folder."""

from __future__ import annotations

from pathlib import Path

from spec_core import Draft, TargetSpec, foreign_errors
from spec_core.errors import ArtifactError, PluginError
from spec_core.plugins import find, load_each
from spec_kit.drafting.draft_files import DOWNLOAD_FIRST, architectures, read_config
from spec_kit.drafting.speculators_layout import KIND


def recognise(folder: Path, target: TargetSpec) -> Draft:
    """Return the draft in ``folder``, read by the installed plugin of the draft's algorithm.

    Raises ArtifactError if no plugin knows the folder or it is damaged, and TargetError if the draft does not fit
    ``target``.
    """
    if not folder.is_dir():
        none = f"there is none of that name; {DOWNLOAD_FIRST}"
        remedy = "give the folder that holds its config.json" if folder.exists() else none
        raise ArtifactError(f"draft {folder} is not a folder: {remedy}")
    tried: list[str] = []
    for name, plugin in load_each(Draft):
        if isinstance(plugin, PluginError):
            tried.append(f"{name} (broken: {plugin})")
            continue
        try:
            with foreign_errors(PluginError, f"its plugin {find(Draft, name).owner} failed"):
                draft = plugin.from_folder(folder)
        except PluginError as error:
            tried.append(f"{name} ({error})")
            continue
        if draft is not None:
            draft.check_target(target)
            return draft
        tried.append(name)
    raise ArtifactError(
        f"{folder} is not a draft that an installed plugin knows (tried: {', '.join(tried) or 'none'}): "
        f"{describe_folder(folder)}"
    )


def describe_folder(folder: Path) -> str:
    """Return a clause on what ``folder`` holds, for the error of a plugin that does not know it as its draft."""
    fields = read_config(folder)
    if fields is None:
        return "it has no config.json; take the folder draft/ of a run, or what spec-trainer export writes"
    if kind := fields.get(KIND):
        return f"it is in the layout of speculators, of the algorithm {kind!r}"
    if not (named := architectures(fields)):
        return "its config.json names no architectures"
    return f"its config.json names the architecture {', '.join(sorted(named))}"
