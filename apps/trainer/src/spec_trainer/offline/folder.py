"""FeatureFolder is the folder that a capture fills with shards. This module imports no torch."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from spec_core.errors import ArtifactError
from spec_trainer.base.disk import check_own, check_writable, locked_folder
from spec_trainer.offline.index import INDEX_FILE, FeatureIdentity, FeatureIndex, read_index, write_index
from spec_trainer.offline.shard import SCRATCH, read_entry


@dataclass(frozen=True)
class FeatureFolder:
    """A folder of features, which may be incomplete."""

    root: Path

    @property
    def _index(self) -> Path:
        return self.root / INDEX_FILE

    def shard(self, number: int) -> Path:
        """Return the path of shard ``number``."""
        return self.root / f"features-{number:05d}.safetensors"

    def has(self, number: int) -> bool:
        """Return whether the folder has a shard; a shard's file gets its final name only when it is complete."""
        return self.shard(number).exists()

    def check_folder(self) -> None:
        """Raise ArtifactError if the folder cannot be written to, or has files but no features."""
        if os.path.isfile(self.root):
            raise ArtifactError(f"output {self.root} is a file; give a folder")
        check_writable(self.root)
        if not os.path.isdir(self.root):
            return
        self._check_logs()
        others = [name for name in os.listdir(self.root) if not self._is_ours(name)]
        if others and not self._index.exists():
            raise ArtifactError(
                f"output {self.root} is not empty ({sorted(others)[0]}) and holds no features; choose another"
            )

    def check_owner(self, identity: FeatureIdentity) -> None:
        """Raise ArtifactError if the folder has another capture's features, or ``check_folder`` refuses it."""
        self.check_folder()
        if self._index.exists() and (differences := read_index(self.root).identity.differences(identity)):
            raise ArtifactError(
                f"output {self.root} holds other features ({'; '.join(differences)}); choose another folder"
            )

    def check_shards(self, identity: FeatureIdentity, num_shards: int) -> None:
        """Raise ArtifactError if a shard is damaged or belongs to another capture; only headers are read."""
        for number in range(num_shards):
            if self.has(number):
                read_entry(self.shard(number), identity)

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder during the ``with`` block.

        After a UsageError, a folder that was empty before and has no shard is emptied again.
        """
        return locked_folder(self.root, "a capture", "features-*")

    def open(self, identity: FeatureIdentity) -> None:
        """Begin a capture in this folder: write an index without shards.

        Incomplete shards that a crash has left are removed.
        """
        self.check_owner(identity)
        for left in self.root.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        if not self._index.exists():
            write_index(self.root, FeatureIndex(identity=identity, shards=(), complete=False))

    def seal(self, identity: FeatureIdentity, num_shards: int) -> None:
        """Write the final index of a folder that has all shards."""
        entries = tuple(read_entry(self.shard(number), identity) for number in range(num_shards))
        write_index(self.root, FeatureIndex(identity=identity, shards=entries, complete=True))

    def _check_logs(self) -> None:
        """Raise ArtifactError if ``logs`` or a file in it is a link, a pipe or a device."""
        logs = self.root / "logs"
        if os.path.lexists(logs):
            check_own(logs, is_folder=True)
            for file in logs.iterdir():
                check_own(file)

    def _is_ours(self, name: str) -> bool:
        """Return whether a capture creates files or folders with the name ``name``."""
        begins = ("features-", "dataset-", INDEX_FILE)
        return name in (".lock", "logs") or name.startswith(SCRATCH) or name.lstrip(".").startswith(begins)
