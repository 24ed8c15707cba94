"""The run directory: who owns it, where each file is, what a crashed run left behind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_core.config import dump_yaml
from spec_core.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spec_trainer.config import AnyRunConfig

_TRAIN_IDENTITY = (
    "lr", "schedule", "warmup_steps", "decay_share", "min_lr_ratio", "betas", "eps", "weight_decay", "clip",
    "dtype", "global_batch_tokens",
)  # fmt: skip


def run_identity(config: AnyRunConfig, data_digest: str, target_digest: str) -> str:
    """What makes two runs the same: data, target, draft, optimizer, seed, dtype, global batch.

    Topology, placement, logging, timeouts and ``train.steps`` may change between start and resume.
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
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def draft(self) -> Path:
        return self.root / "draft"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def _owner(self) -> Path:
        return self.root / ".identity"

    def check_owner(self, identity: str) -> None:
        """Raises ArtifactError if the directory belongs to another run, is no run directory, or cannot be made."""
        if not os.path.exists(self.root):
            check_creatable(self.root)
            return
        if not self.root.is_dir():
            raise ArtifactError(f"output {self.root} is a file; give a directory")
        if not self._owner.exists():
            if any(path.name != ".lock" for path in self.root.iterdir()):
                raise ArtifactError(
                    f"output {self.root} is not empty and is no run directory; choose another"
                )
            return
        if self._owner.read_text().strip() != identity:
            raise ArtifactError(
                f"output {self.root} belongs to another run (data, target, draft, optimizer, seed, dtype or "
                "global batch differ); choose another output, or remove it to start anew"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second run out for as long as this one lives; the kernel lets go whatever this process dies of.

        What is found wrong before a first checkpoint, such as a target that the engine cannot load, leaves nothing.
        """
        fresh = not os.path.exists(self.root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArtifactError(f"output {self.root} cannot be created: {error.strerror}") from error
        with (self.root / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ArtifactError(f"output {self.root} is in use by a run that is under way") from error
            try:
                yield
            except UsageError:
                if fresh and not any(self.checkpoints.glob("step-*")):
                    shutil.rmtree(self.root)
                raise

    def open(self, identity: str, config: AnyRunConfig) -> None:
        """Takes ownership and writes the resolved configuration."""
        self.check_owner(identity)
        self.logs.mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        for left in self.checkpoints.glob(".*"):  # a checkpoint that a crash cut short
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        write_atomically(self._owner, identity + "\n")
        write_atomically(self.config, dump_yaml(config))

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.summary, json.dumps(summary, indent=2) + "\n")


def check_creatable(folder: Path) -> None:
    """Raises ArtifactError where ``folder`` cannot be made; makes nothing."""
    above = next(parent for parent in folder.absolute().parents if os.path.exists(parent))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ArtifactError(
            f"output {folder} cannot be created: {above} is not a folder that can be written to"
        )


def write_atomically(file: Path, text: str) -> None:
    """A reader sees the old file or the new one, whole."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(file)
