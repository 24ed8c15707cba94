"""SglangEngine is the engine plugin in which unmodified SGLang runs the target."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar, cast

from spec_core import EngineAbilities
from spec_core.errors import ConfigError
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.process import SglangProcess
from spec_engine_sglang.server_counters import sglang_counters
from spec_engine_sglang.serving_format import (
    check_sglang_folder,
    check_speculation,
    image_warning,
    sglang_command,
    sglang_problem,
    version_needs,
)
from spec_kit.hosting import SpeculativeMode, SubprocessEngine, probe_version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from spec_core import Draft, EngineConfig, FrozenProducts, TargetSpec
    from spec_core.records import Availability, ServerCounters
    from spec_kit.hosting import Mode, ProgramReplica

log = logging.getLogger(__name__)

BEFORE = "<0.5.24"
VERSIONS = f">=0.5.16,{BEFORE}"
"""The supported versions of SGLang. docs/engines-sglang.md lists the checks of each version."""


@cache
def _warn(message: str) -> None:
    """Log a warning only once, because a command checks the same export several times."""
    log.warning("%s", message)


class SglangEngine(SubprocessEngine):
    """The engine ``sglang``: captures through SGLang's plugin entry point, and serves drafts.

    The sampling option ``seed`` has no effect, because SGLang sets its seed when it starts.
    ``max_new_tokens=0`` runs only the prefill.
    """

    name: ClassVar[str] = "sglang"
    api_version: ClassVar[int] = 1
    abilities: ClassVar[EngineAbilities] = EngineAbilities(
        fresh_weights=True,
        guess_depths=True,
        images=True,
        image_types=frozenset(
            {"qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"}
        ),
    )
    Config: ClassVar[type[EngineConfig]] = SglangConfig

    @classmethod
    def probe(cls) -> Availability:
        """Return whether a supported SGLang is installed."""
        return probe_version(VERSIONS, "sglang")

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> None:
        """Raise UsageError if SGLang cannot serve the draft as configured (E8)."""
        cls.serving_method(config, draft, folder)
        check_sglang_folder(folder, target)
        check_speculation(folder, num_draft_tokens)

    @classmethod
    def check_export(cls, target: TargetSpec, draft: Draft, folder: Path) -> None:
        """Raise ArtifactError if no supported SGLang can serve the export."""
        if cls.name in draft.serving_methods:
            check_sglang_folder(folder, target)
            if warning := image_warning(folder, target):
                _warn(warning)

    @classmethod
    def serving(cls, target: TargetSpec, draft: Draft) -> Availability:
        """Return whether an SGLang that can serve the draft's exports is installed here (E19)."""
        super().serving(target, draft)
        if problem := sglang_problem(draft, target):
            raise ConfigError(problem)
        for needed, problem in version_needs(draft.exported_config(target)):
            found = probe_version(f"{needed},{BEFORE}", "sglang", needed_by="this draft")
            if not found.ok:
                return replace(found, reason=f"{problem}; {found.reason}")
        return cls.probe()

    @classmethod
    def serving_command(
        cls, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> str | None:
        """Return the shell command that starts SGLang with the draft (E15)."""
        mode = SpeculativeMode(
            folder=folder, method=draft.serving_methods[cls.name], num_draft_tokens=num_draft_tokens, load=0
        )
        return sglang_command(target, mode)

    @classmethod
    def live_server_words(cls, host: str, port: int) -> list[str]:
        """Return the flags of a server; the plugin in SGLang's process does the rest (E20)."""
        return ["--host", host, "--port", str(port)]

    @classmethod
    def server_counters(cls, metrics: str) -> ServerCounters | None:
        """Return the counters of an SGLang server from its metrics; None for another program (E16)."""
        return sglang_counters(metrics)

    def start_program(self, mode: Mode) -> SglangProcess:
        """Start SGLang in a separate process."""
        return SglangProcess(cast("SglangConfig", self.config), self.target, self.context, mode)

    def frozen_products(self, token_ids: Sequence[int], vector: Sequence[float]) -> FrozenProducts | None:
        """Return products with the tables in the program's model (E21)."""
        return self.program_products(token_ids, vector)

    def draft_replica(self, group: str = "default") -> ProgramReplica:
        """Return the replica that updates the draft's weights while SGLang speculates (E10)."""
        return self.program_replica(cast("SglangConfig", self.config).tensor_parallel)

    def limit(self, mode: Mode) -> tuple[int, str]:
        """Return the maximum number of tokens of a request, and the name of the setting that limits it."""
        # A position beyond the target's maximum would end SGLang, even the position of a rejected draft token.
        drafted = mode.num_draft_tokens if isinstance(mode, SpeculativeMode) else 0
        return self.target.max_positions - drafted, f"max_position_embeddings of target {self.target.folder}"
