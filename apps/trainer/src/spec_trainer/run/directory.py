"""RunDirectory has the paths of a run's files, checks which run owns them, and removes crash leftovers."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from spec_core.errors import ArtifactError, RunError
from spec_core.foreign import read_bytes
from spec_core.wording import printable, shortened
from spec_trainer.base.disk import check_own, check_writable, locked_folder, remove, write_atomically
from spec_trainer.configuration import dump_yaml
from spec_trainer.configuration.run import AnyRunConfig

_TRAIN_IDENTITY = (
    "lr", "schedule", "warmup_steps", "decay_share", "min_lr_ratio", "clip", "dtype", "fp8",
    "global_batch_tokens",
)  # fmt: skip


def run_identity(config: AnyRunConfig, data_digest: str, target_digest: str) -> str:
    """Return the run's identity: a digest each of data, chat format, target, draft, optimizer and batch.

    It is one line of ``name=digest``, so that two identities show what differs between their runs.

    Seed, dtype, and options of the draft, the optimizer and the strategy are included, except options that change
    speed only. The strategy itself, the number of processes, placement, logging, timeouts and ``train.steps`` are
    not: they may change between start and resume.
    """
    parts = {
        "data": data_digest,
        "data.shuffle": config.data.shuffle,
        "data.features_dtype": config.data.features_dtype,
        "target": target_digest,
        "draft": config.draft.model_dump(mode="json", exclude={*config.draft.speed_only}),
        "train": {key: getattr(config.train, key) for key in _TRAIN_IDENTITY},
        "optimizer": config.optimizer.model_dump(mode="json", exclude={*config.optimizer.speed_only}),
        # Defaults are left out, because another strategy without these options may go on with the run.
        "strategy": config.strategy.model_dump(
            mode="json", exclude={"name", *config.strategy.speed_only}, exclude_defaults=True
        ),
        "seed": config.seed,
    }
    if any(config.data.record().values()):  # other settings may give the same tokens
        parts["chat"] = config.data.record()
    if config.decode.every:
        decode = config.decode.model_dump(mode="json", exclude={"replicas"})
        parts["decode"] = {**decode, "push_every": config.train.push_every}
    return " ".join(f"{name}={_digest(part)}" for name, part in sorted(parts.items()))


def _digest(part: object) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()[:_DIGITS]


def _differences(one: str, other: str) -> str:
    """Return the names of the parts in which two identities differ.

    ``one`` may be another version's, which had one digest of all parts.
    """
    if "=" not in one:
        return "the version that began it"
    names = {part.partition("=")[0] for part in {*one.split()} ^ {*other.split()}}
    return printable(shortened(" and ".join(sorted(names)), 200))


_IDENTITY_BYTES = 1 << 10
_DIGITS = 16
"""Hexadecimal digits of the digest of a part of the identity."""


class RunDirectory:
    """Paths of one run's files; nothing is created before ``open``."""

    def __init__(self, root: Path) -> None:
        """Set the path of each file and folder below ``root``."""
        self.root = root
        self.config = root / "config.yaml"
        """File of the complete, resolved configuration."""
        self.replacements = root / "logs" / "replacements.jsonl"
        """File with a JSON object for each replacement of an engine: time and cause."""
        self.metrics = root / "metrics.jsonl"
        """File with a JSON object for each step."""
        self.summary = root / "summary.json"
        """File with the figures of the finished run."""
        self.checkpoints = root / "checkpoints"
        """Folder of the checkpoints."""
        self.versions = root / "versions.jsonl"
        """File with a JSON object for each draft that was judged on live requests (``spec-trainer follow``)."""
        self.requests = root / "requests.sqlite3"
        """File of live requests; it exists only with ``follow.retention``."""
        self.requests_journal = root / "requests.sqlite3-journal"
        """File with which SQLite undoes an unfinished write of ``requests``."""
        self.draft = root / "draft"
        """Folder of the exported draft."""
        self.decoded = root / "decoded"
        """Folder of the engine's answers and of served drafts (``decode.every``, ``train.serve_every``)."""
        self.measurements = self.decoded / "measurements.jsonl"
        """File with a JSON object for each draft that the run's engine has measured (``train.serve_every``)."""
        self.report = root / "report.html"
        """File of the HTML report."""
        self.logs = root / "logs"
        """Folder with a log file for each process."""
        self._owner = root / ".identity"

    def served_draft(self, version: int) -> Path:
        """Return the folder of the draft of step ``version``, which the run's engines serve; it may not exist."""
        return self.decoded / f"draft-{version}"

    def check_folder(self) -> None:
        """Raise ArtifactError if the directory cannot be written to, or has files but is no run directory."""
        if os.path.isfile(self.root):
            raise ArtifactError(f"output {self.root} is a file; give a directory")
        check_writable(self.root)
        self._check_entries()
        inside = os.listdir(self.root) if os.path.isdir(self.root) else []
        strange = [name for name in inside if not name.startswith((".lock", self._owner.name))]
        if strange and not self._owner.exists():
            raise ArtifactError(f"output {self.root} is not empty and is no run directory; choose another")

    def check_owner(self, identity: str) -> None:
        """Raise ArtifactError if the directory belongs to another run, or cannot be a run's directory."""
        begun_as = self.begun_as()
        if begun_as not in (None, identity):
            raise ArtifactError(
                f"output {self.root} belongs to another run (different: {_differences(begun_as, identity)}); choose "
                "another output, or remove it to start anew"
            )

    def begun_as(self) -> str | None:
        """Return the ``run_identity`` of the run that owns the directory; None if it is no run directory."""
        self.check_folder()
        return self._identity() if self._owner.exists() else None

    def locked(self) -> AbstractContextManager[None]:
        """Lock the directory during the ``with`` block.

        After a UsageError, a directory that was empty before and has no checkpoint is emptied again.
        """
        return locked_folder(self.root, "a run", "checkpoints/step-*")

    def open(self, identity: str, config: AnyRunConfig) -> None:
        """Write the owner file, then create the subfolders, then write the resolved configuration."""
        self.check_owner(identity)
        write_atomically(self._owner, identity + "\n")
        self.logs.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        self.remove_unfinished()
        write_atomically(self.config, dump_yaml(config))

    def remove_unfinished(self) -> None:
        """Remove a killed run's unfinished checkpoints and exports, and a launcher's hidden files in ``logs``.

        No process may be writing to the directory.
        """
        self._check_entries()  # nothing is removed through a link
        folders = (self.checkpoints, self.decoded, self.logs)
        for left in (
            *self.root.glob(".draft-*"),
            *(file for folder in folders for file in folder.glob(".*")),
        ):
            remove(left)

    def _check_entries(self) -> None:
        """Raise ArtifactError if a path that the run reads, writes or removes is a link, a pipe or a device.

        The draft folder is not checked, because it is replaced as a whole. Each checkpoint is checked when it is
        read; if a checkpoint is a link, only the link is ever removed.
        """
        folders = (self.checkpoints, self.decoded, self.logs)
        files = (self.config, self.metrics, self.versions, self.summary, self.report, self._owner)
        files += (self.requests, self.requests_journal)
        for path in filter(os.path.lexists, (*folders, *files)):
            check_own(path, is_folder=path in folders)
        for folder in (self.decoded, self.logs):
            for parent, inner, names in os.walk(folder):
                for name in (*inner, *names):
                    check_own(Path(parent, name), is_folder=name in inner)

    def _identity(self) -> str:
        return read_bytes(self._owner, ArtifactError, _IDENTITY_BYTES).decode(errors="replace").strip()

    def check_still_owned(self, identity: str) -> None:
        """Raise RunError if the directory was removed or taken by another run since this run opened it."""
        if not self._owner.exists() or self._identity() != identity:
            raise RunError(f"output {self.root} was removed or replaced while this run was under way")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``."""
        write_atomically(self.summary, json.dumps(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return ``summary.json``."""
        return json.loads(self.summary.read_text())
