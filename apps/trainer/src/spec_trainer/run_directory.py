"""The run directory: who owns it, where each file is, what a crashed run left behind."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_core.config import dump_yaml
from spec_core.errors import ArtifactError, RunError, UsageError
from spec_trainer.disk import locked_folder, not_written

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spec_trainer.config import AnyRunConfig

_TRAIN_IDENTITY = (
    "lr", "schedule", "warmup_steps", "decay_share", "min_lr_ratio", "betas", "eps", "weight_decay", "clip",
    "dtype", "global_batch_tokens",
)  # fmt: skip


def run_identity(config: AnyRunConfig, data_digest: str, target_digest: str) -> str:
    """Return a digest of data, target, draft, optimizer, seed, dtype and global batch: equal for the same run.

    Strategy, number of processes, placement, logging, timeouts and ``train.steps`` may change between start and
    resume.
    """
    parts = {
        "data": data_digest,
        "shuffle": config.data.shuffle,
        "target": target_digest,
        "draft": config.draft.model_dump(mode="json"),
        "train": {key: getattr(config.train, key) for key in _TRAIN_IDENTITY},
        "seed": config.seed,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run; nothing is created before ``open``."""

    root: Path

    @property
    def config(self) -> Path:
        """The whole configuration, resolved."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object for each step."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """Numbers of the finished run."""
        return self.root / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def draft(self) -> Path:
        """Folder of the exported draft."""
        return self.root / "draft"

    @property
    def report(self) -> Path:
        """Page with curves and numbers."""
        return self.root / "report.html"

    @property
    def logs(self) -> Path:
        """Folder of each process's log."""
        return self.root / "logs"

    @property
    def _owner(self) -> Path:
        return self.root / ".identity"

    def check_folder(self) -> None:
        """Raise ArtifactError if the directory is no run directory, or cannot be made or written to."""
        if os.path.isfile(self.root):
            raise ArtifactError(f"output {self.root} is a file; give a directory")
        check_writable(self.root)
        inside = os.listdir(self.root) if os.path.isdir(self.root) else []
        strange = [name for name in inside if not name.startswith((".lock", self._owner.name))]
        if strange and not self._owner.exists():
            raise ArtifactError(f"output {self.root} is not empty and is no run directory; choose another")

    def check_owner(self, identity: str) -> None:
        """Raise ArtifactError as ``check_folder`` does, and if the directory belongs to another run."""
        self.check_folder()
        if os.path.exists(self._owner) and self._owner.read_text().strip() != identity:
            raise ArtifactError(
                f"output {self.root} belongs to another run (data, target, draft, optimizer, seed, dtype or "
                "global batch differ); choose another output, or remove it to start anew"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second run out for as long as this one lives; the kernel lets go whatever this process dies of.

        What is found wrong before a first checkpoint, such as a target that the engine cannot load, leaves nothing.
        """
        made = not os.path.exists(self.root)
        fresh = not (os.path.isdir(self.root) and os.listdir(self.root))
        with locked_folder(self.root, "a run"):
            try:
                yield
            except UsageError:
                if fresh and not any(self.checkpoints.glob("step-*")):
                    for path in self.root.iterdir():
                        _remove(path)
                    if made:
                        self.root.rmdir()
                raise

    def open(self, identity: str, config: AnyRunConfig) -> None:
        """Take ownership, before anything else is in the directory, and write the resolved configuration."""
        self.check_owner(identity)
        write_atomically(self._owner, identity + "\n")
        self.logs.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        self.remove_unfinished()
        write_atomically(self.config, dump_yaml(config))

    def remove_unfinished(self) -> None:
        """Remove the checkpoints and exports that a failure has cut short; no process may be writing."""
        for left in (*self.checkpoints.glob(".*"), *self.root.glob(".draft-*")):
            _remove(left)

    def check_still_owned(self, identity: str) -> None:
        """Raise RunError where the directory was removed, or given to another run, since this one has opened it."""
        if not self._owner.exists() or self._owner.read_text().strip() != identity:
            raise RunError(f"output {self.root} was removed or replaced while this run was under way")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``."""
        write_atomically(self.summary, json.dumps(summary, indent=2) + "\n")


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def check_writable(folder: Path) -> None:
    """Raise ArtifactError where ``folder`` cannot be made or written to; make nothing."""
    path = folder.absolute()
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ArtifactError(f"output {folder}: {there} is not a folder that can be written to")


def write_atomically(file: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, whole. Raise RunError where there is no room."""
    scratch = file.with_name(f".{file.name.lstrip('.')}.{secrets.token_hex(8)}")
    try:
        with scratch.open("x") as stream:  # never through what somebody has put there
            stream.write(text)
        scratch.replace(file)
    except OSError as error:
        raise not_written(file, file.parent, error) from error
    finally:
        scratch.unlink(missing_ok=True)
