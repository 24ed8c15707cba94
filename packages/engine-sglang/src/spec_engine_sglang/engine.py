"""SglangEngine is the engine plugin in which unmodified SGLang runs the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, cast

from spec_core import Draft, EngineAbilities, EngineConfig, FrozenProducts, Serving, TargetSpec
from spec_core.records import Availability
from spec_engine_sglang.config import SglangConfig
from spec_engine_sglang.process import SglangProcess
from spec_engine_sglang.serving import VERSIONS, SglangServing
from spec_engine_sglang.serving_format import check_sglang_folder, check_speculation
from spec_kit.hosting import Mode, ProgramReplica, SpeculativeMode, SubprocessEngine, probe_version


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
    serving: ClassVar[Serving | None] = SglangServing()

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

    def start_program(self, mode: Mode) -> SglangProcess:
        """Start SGLang in a separate process."""
        return SglangProcess(cast("SglangConfig", self.config), self.target, self.context, mode)

    def frozen_products(self, token_ids: Sequence[int], vector: Sequence[float]) -> FrozenProducts | None:
        """Return products with the tables in the program's model; None if it cannot compute them (E17)."""
        return self.program_products(token_ids, vector)

    def draft_replica(self, group: str = "default") -> ProgramReplica:
        """Return the replica that updates the draft's weights while SGLang speculates (E10)."""
        return self.program_replica(cast("SglangConfig", self.config).tensor_parallel)

    def limit(self, mode: Mode) -> tuple[int, str]:
        """Return the maximum number of tokens of a request, and the name of the setting that limits it."""
        # A position beyond the target's maximum would end SGLang, even the position of a rejected draft token.
        drafted = mode.num_draft_tokens if isinstance(mode, SpeculativeMode) else 0
        return self.target.max_positions - drafted, f"max_position_embeddings of target {self.target.folder}"
