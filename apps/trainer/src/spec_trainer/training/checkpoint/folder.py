"""Read and check a checkpoint's folder ``step-N`` without importing torch.

``meta.json`` in it has a digest of every other file, and a digest of its own content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from pydantic import Field

from spec_core import Config, foreign_errors
from spec_core.errors import ArtifactError, ConfigError
from spec_core.foreign import parse_json_object, read_bytes
from spec_core.validation import validate
from spec_kit.sharding.safetensors_folder import new_digest
from spec_trainer.base.disk import remove

META_FILE, CONFIG_FILE, STATE_FOLDER = "meta.json", "config.yaml", "state"
BEST = "best"
"""Name of the symbolic link to the best step folder."""

_STEP = re.compile(r"step-\d+")
_FILE = rf"^({CONFIG_FILE}|{STATE_FOLDER}/[^/]+)$"


class CheckpointMeta(Config):
    """Content of ``meta.json`` of a step folder."""

    step: Annotated[int, Field(ge=0, lt=2**63)]
    """Optimizer steps done."""
    identity: str
    target_digest: str
    acceptance_length: Annotated[float, Field(ge=0)] | None = None
    """Simulated acceptance length on held-out data; None if the draft was not evaluated at this step."""
    files: dict[Annotated[str, Field(pattern=_FILE)], str] = Field(default_factory=dict)
    """Relative path of each other file -> digest of the file; empty until the files are written."""

    def to_json(self) -> str:
        """Return the text of ``meta.json``, including a checksum of its content."""
        body = self.model_dump(mode="json")
        checksum = new_digest(json.dumps(body).encode()).hexdigest()
        return json.dumps({**body, "checksum": checksum}, indent=2) + "\n"


def read_meta(folder: Path) -> CheckpointMeta:
    """Return the content of ``meta.json``. Raise ArtifactError if it is damaged or missing."""
    file = folder / META_FILE
    if not file.is_file() or not (folder / STATE_FOLDER).is_dir():
        found = folder / "checkpoints"
        hint = f"; those of this run are in {found}" if found.is_dir() else ""
        raise ArtifactError(
            f"{folder} is not a checkpoint: expected a step-N folder with meta.json and state/{hint}"
        )
    content = read_bytes(file, ArtifactError)
    values = parse_json_object(content, file, ArtifactError)
    values.pop("checksum", None)
    try:
        meta = validate(CheckpointMeta, values, str(file))
    except ConfigError as error:
        raise ArtifactError(f"{file} is damaged: {error}") from error
    # Compare the text instead of its values, so that no byte changes unnoticed.
    if content != meta.to_json().encode():
        raise ArtifactError(f"{file} is damaged: its checksum differs")
    return meta


def check_whole(folder: Path) -> CheckpointMeta:
    """Check every file of a checkpoint against its digest, and return the content of its ``meta.json``.

    Raise ArtifactError with the name of a file that is missing, unlisted or changed.
    """
    meta = read_meta(folder)
    present = {f"{STATE_FOLDER}/{file.name}" for file in (folder / STATE_FOLDER).iterdir()}
    if unlisted := sorted(present - meta.files.keys()):
        raise ArtifactError(f"{folder / unlisted[0]} is damaged: {META_FILE} does not list it")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _digest_of(folder / name), meta.files)
        for (name, expected), actual in zip(meta.files.items(), found, strict=True):
            if actual != expected:
                raise ArtifactError(f"{folder / name} is damaged: its checksum is not the one in {META_FILE}")
    return meta


def finished(root: Path) -> list[Path]:
    """Return the step folders of ``root`` that have a ``meta.json``, oldest first."""
    return [folder for folder in step_folders(root) if (folder / META_FILE).is_file()]


def step_folders(root: Path) -> list[Path]:
    """Return the step folders of ``root``, finished or not, in order of steps."""
    named = [folder for folder in root.glob("step-*") if _STEP.fullmatch(folder.name)]
    return sorted(named, key=step_of)


def step_of(folder: Path) -> int:
    """Return N of a folder ``step-N``: the number of optimizer steps done."""
    return int(folder.name.removeprefix("step-"))


def scratch_folder(folder: Path) -> Path:
    """Return the hidden folder in which a step folder is written before it is renamed."""
    return folder.with_name(f".{folder.name}")


def discard(folder: Path) -> None:
    """Remove the folder of a checkpoint; if it is a link, remove only the link.

    The folder is renamed first, so that a crash leaves no partial checkpoint with a valid name.
    """
    if os.path.lexists(folder):
        doomed = folder.with_name(f".{folder.name}.old")
        folder.rename(doomed)
        remove(doomed)


def _digest_of(file: Path) -> str:
    if not file.is_file():  # reading a pipe would block
        raise ArtifactError(f"{file} is missing")
    with foreign_errors(ArtifactError, f"{file} cannot be read"), file.open("rb") as stream:
        return hashlib.file_digest(stream, new_digest).hexdigest()
