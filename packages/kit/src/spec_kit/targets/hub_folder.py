"""Find which repository of the Hugging Face hub a folder is a copy of."""

from __future__ import annotations

from pathlib import Path


def hub_name(folder: Path) -> str | None:
    """Return the name, owner/name, of a repository's folder in the hub client's cache; None for another folder."""
    repository, snapshots = folder.absolute().parts[-3:-1] if len(folder.absolute().parts) > 3 else ("", "")
    kind, *name = repository.split("--")
    return "/".join(name) if (kind, snapshots, len(name)) == ("models", "snapshots", 2) else None
