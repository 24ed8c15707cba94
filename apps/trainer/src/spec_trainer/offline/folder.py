"""FeatureFolder: the folder that a capture fills: who owns it, which shards are there. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import ArtifactError, UsageError
from spec_trainer.offline.index import INDEX_FILE, FeatureIndex, read_index, write_index
from spec_trainer.offline.shard import SCRATCH, read_entry
from spec_trainer.run_directory import check_writable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spec_trainer.offline.index import FeatureIdentity

_LOCK = ".lock"


@dataclass(frozen=True)
class FeatureFolder:
    root: Path

    def shard(self, number: int) -> Path:
        return self.root / f"features-{number:05d}.safetensors"

    def has(self, number: int) -> bool:
        """The shard is complete: a file has its name only then."""
        return self.shard(number).exists()

    def check_owner(self, identity: FeatureIdentity) -> None:
        """Raises ArtifactError if the folder holds other features or things, or cannot be made or written to."""
        if os.path.isfile(self.root):
            raise ArtifactError(f"output {self.root} is a file; give a folder")
        check_writable(self.root)
        if not os.path.isdir(self.root):
            return
        if (self.root / INDEX_FILE).exists():
            found = read_index(self.root).identity
            if differences := found.differences(identity):
                raise ArtifactError(
                    f"output {self.root} holds other features ({'; '.join(differences)}); choose another folder"
                )
        elif strangers := [name for name in os.listdir(self.root) if not self._is_ours(name)]:
            raise ArtifactError(
                f"output {self.root} is not empty ({sorted(strangers)[0]}) and holds no features; choose another"
            )

    def check_shards(self, identity: FeatureIdentity, num_shards: int) -> None:
        """Raises ArtifactError for a shard that is damaged or of another capture; looks at headers only."""
        for number in range(num_shards):
            if self.has(number):
                read_entry(self.shard(number), identity)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second capture out for as long as this one lives; an attempt that stored nothing leaves nothing."""
        fresh = not os.path.exists(self.root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArtifactError(f"output {self.root} cannot be created: {error.strerror}") from error
        with (self.root / _LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ArtifactError(f"output {self.root} is in use by a capture that is under way") from error
            try:
                yield
            except UsageError:
                if fresh and not any(self.root.glob("features-*")):
                    shutil.rmtree(self.root)
                raise

    def open(self, identity: FeatureIdentity) -> None:
        """Takes ownership: says so in the index, and removes what a crash cut short."""
        self.check_owner(identity)
        for left in self.root.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        if not (self.root / INDEX_FILE).exists():
            write_index(self.root, FeatureIndex(identity=identity, shards=(), complete=False))

    def seal(self, identity: FeatureIdentity, num_shards: int) -> None:
        """Every shard is there: the index lists them all."""
        entries = tuple(read_entry(self.shard(number), identity) for number in range(num_shards))
        write_index(self.root, FeatureIndex(identity=identity, shards=entries, complete=True))

    def _is_ours(self, name: str) -> bool:
        """What a capture leaves when its index is gone."""
        begins = ("features-", "dataset-", INDEX_FILE)
        return name in (_LOCK, "logs") or name.startswith(SCRATCH) or name.lstrip(".").startswith(begins)
