"""VllmEngine: the target run by stock vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from spec_trainer.engines.hosted_engine import HostedEngine
from spec_trainer.engines.serving_formats import check_for_vllm
from spec_trainer.engines.vllm import versions
from spec_trainer.engines.vllm.arguments import longest
from spec_trainer.engines.vllm.config import VllmConfig
from spec_trainer.engines.vllm.process import VllmProcess

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core.config import EngineConfig
    from spec_core.records import Availability
    from spec_core.target import TargetSpec
    from spec_trainer.engines.modes import Mode


class VllmEngine(HostedEngine):
    name: ClassVar[str] = "vllm"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[EngineConfig]] = VllmConfig

    @classmethod
    def probe(cls) -> Availability:
        return versions.availability()

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, folder: Path, num_draft_tokens: int
    ) -> None:
        check_for_vllm(folder, target, versions.for_processors())

    def _process(self, mode: Mode, desk_address: str | None) -> VllmProcess:
        return VllmProcess(cast("VllmConfig", self.config), self.target, self._site, mode, desk_address)

    def _limit(self, mode: Mode) -> tuple[int, str]:
        return longest(cast("VllmConfig", self.config), self.target, mode), "engine.max_model_len"
