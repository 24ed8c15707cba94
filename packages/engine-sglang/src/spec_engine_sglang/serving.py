"""SglangServing says how users serve drafts with ``python -m sglang.launch_server``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from spec_core import Draft, Serving, TargetSpec
from spec_core.errors import ConfigError
from spec_core.records import Availability, ServerCounters
from spec_engine_sglang.server_counters import sglang_counters
from spec_engine_sglang.serving_format import (
    check_sglang_folder,
    image_warning,
    sglang_command,
    sglang_command_by_load,
    sglang_problem,
    version_needs,
)
from spec_kit.hosting import SpeculativeMode, probe_version

log = logging.getLogger(__name__)

BEFORE = "<0.5.24"
VERSIONS = f">=0.5.16,{BEFORE}"
"""The supported versions of SGLang. docs/engines-sglang.md lists the checks of each version."""


@cache
def warn_once(message: str) -> None:
    """Log a warning only once, because a command checks the same export several times."""
    log.warning("%s", message)


class SglangServing(Serving):
    """Unmodified SGLang."""

    def check_export(self, target: TargetSpec, draft: Draft, folder: Path) -> None:
        """Raise ArtifactError if no supported SGLang can serve the export; warn of ``image_warning``."""
        check_sglang_folder(folder, target)
        if warning := image_warning(folder, target):
            warn_once(warning)

    def availability(self, target: TargetSpec, draft: Draft) -> Availability:
        """Return whether an SGLang that can serve the draft's exports is installed here (V2)."""
        if "sglang" not in draft.serving_methods:
            raise ConfigError(f"it does not serve draft {draft.name!r} with these options")
        if problem := sglang_problem(draft, target):
            raise ConfigError(problem)
        for needed, problem in version_needs(draft.exported_config(target)):
            found = probe_version(f"{needed},{BEFORE}", "sglang", needed_by="this draft")
            if not found.ok:
                return replace(found, reason=f"{problem}; {found.reason}")
        return probe_version(VERSIONS, "sglang")

    def command(self, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int) -> str:
        """Return the shell command that starts SGLang with the draft."""
        return sglang_command(target, _mode(draft, folder, num_draft_tokens))

    def command_by_load(
        self, target: TargetSpec, draft: Draft, folder: Path, draft_tokens: Mapping[int, int]
    ) -> str:
        """Return the shell command that starts SGLang with a number of draft tokens for each load (V7)."""
        return sglang_command_by_load(target, _mode(draft, folder, max(draft_tokens.values())), draft_tokens)

    def live_server_words(self, host: str, port: int) -> list[str]:
        """Return the flags of a server; the plugin in SGLang's process does the rest (V4)."""
        return ["--host", host, "--port", str(port)]

    def counters(self, metrics: str) -> ServerCounters | None:
        """Return the counters of an SGLang server from its metrics; None for another program."""
        return sglang_counters(metrics)


def _mode(draft: Draft, folder: Path, num_draft_tokens: int) -> SpeculativeMode:
    method = draft.serving_methods["sglang"]
    return SpeculativeMode(folder=folder, method=method, num_draft_tokens=num_draft_tokens, load=0)
