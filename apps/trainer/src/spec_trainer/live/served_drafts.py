"""ServedDrafts exports the drafts of a run that follows servers, and pushes them."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_core.errors import RunError, UsageError
from spec_core.foreign import cause
from spec_trainer.base.disk import new_folder, remove
from spec_trainer.live.cycles import first_weights
from spec_trainer.live.verdicts import ServedVersion, first_target, last_served
from spec_trainer.push.publish import publish_draft
from spec_trainer.run.draft_trainer import export_draft
from spec_trainer.run.spec import RunSpec
from spec_trainer.training.checkpoint.store import read_weights
from spec_trainer.workers.decoded_folder import DecodedFolder

log = logging.getLogger(__name__)

_RETRY_S = 60.0
"""Seconds until the next push to a server that serves an earlier draft."""


class ServedDrafts:
    """The start draft, the draft that the servers serve, and the draft that may replace it.

    Methods that take a RunSpec use its target, whose weights may change during a run.
    """

    def __init__(self, spec: RunSpec) -> None:
        """Find the draft that was pushed last."""
        self._folder = DecodedFolder(spec.directory)
        self.served = last_served(spec)
        """The draft that the servers serve, or the start draft."""
        self.num_pushes = 0
        """Number of pushes that servers have committed since the command began."""
        self._first_target = first_target(spec)
        self._retry_at_s = time.monotonic()
        """Time (``time.monotonic``) from which a server with an earlier draft may be pushed to again."""

    @property
    def current(self) -> Path:
        """Folder of the served draft."""
        return self._folder.draft(self.served.step)

    def prepare(self, spec: RunSpec) -> Path | None:
        """Remove drafts that were not pushed. If there is no start draft yet, export it and return its folder."""
        start = self._folder.draft(0)
        is_new = not start.exists()
        if is_new:
            _export(spec, first_weights(spec), start)
        self.remove_others()
        return start if is_new else None

    def export(self, spec: RunSpec, step: int) -> dict[int, Path]:
        """Export the draft of step ``step``. Return the folders of this, the served and the start draft, by step."""
        checkpoint = spec.directory.checkpoints / f"step-{step}"
        _export(spec, read_weights(spec.strategy_type, checkpoint), self._folder.draft(step))
        return {number: self._folder.draft(number) for number in (step, self.served.step, 0)}

    def remove_others(self) -> None:
        """Remove all drafts but the served and the start draft."""
        self._folder.keep_only(0, self.served.step)

    def push_to_returned(self, spec: RunSpec, versions: Mapping[str, int | None]) -> None:
        """Push the served draft again if a server serves an earlier version, such as after its restart.

        ``versions``: the version that each server serves, by its address.
        """
        newest = self.served.version
        if newest is None:
            return
        is_behind = any(version is None or version < newest for version in versions.values())
        if is_behind and time.monotonic() >= self._retry_at_s:
            log.info("a server has come back with an earlier draft")
            self._retry_at_s = time.monotonic() + _RETRY_S
            self.push(spec, self.served.step, list(versions))

    def push(self, spec: RunSpec, step: int, servers: list[str]) -> bool:
        """Push the draft of step ``step`` to every server; return whether any committed it."""
        if not servers:
            return False
        draft = self._folder.draft(step)
        options = spec.config.push
        backend = spec.config.backend.name
        try:
            report = publish_draft(draft, spec.target, servers, options, backend)
            if not report.committed and self._first_target.digest != spec.target.digest:
                # Servers whose weights were replaced in place still name the target that they were started with.
                report = publish_draft(draft, self._first_target, servers, options, backend)
        except (RunError, UsageError) as error:
            log.warning("the draft of step %d was not pushed: %s", step, cause(error))
            return False
        for url, outcome in report.replicas.items():
            if outcome.state != "committed":
                log.warning("%s did not take the draft of step %d: %s", url, step, outcome.reason)
        if not report.committed:
            return False
        log.info("servers have the draft of step %d as version %d", step, report.version)
        self.served = ServedVersion(step, report.version)
        self.num_pushes += 1
        return True

    def copy_into(self, folder: Path) -> None:
        """Replace ``folder`` by a copy of the served draft."""
        scratch = new_folder(folder.parent, ".draft-")
        shutil.copytree(self.current, scratch, dirs_exist_ok=True)
        if os.path.lexists(folder):
            remove(folder)
        scratch.rename(folder)


def _export(spec: RunSpec, weights: dict[str, Any], folder: Path) -> None:
    export_draft(spec.draft, weights, spec.target, folder, spec.config.data)
