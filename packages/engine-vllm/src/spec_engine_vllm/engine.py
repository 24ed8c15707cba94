"""VllmEngine: the target run by stock vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from spec_core.hosting import SubprocessEngine
from spec_engine_vllm import versions
from spec_engine_vllm.arguments import longest
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.process import VllmProcess
from spec_engine_vllm.serving_format import check_vllm_folder

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core import Draft, EngineConfig, TargetSpec
    from spec_core.hosting import Mode
    from spec_core.records import Availability


class VllmEngine(SubprocessEngine):
    """The engine ``vllm``: captures through a KV connector, and serves drafts."""

    name: ClassVar[str] = "vllm"
    api_version: ClassVar[int] = 2
    Config: ClassVar[type[EngineConfig]] = VllmConfig

    @classmethod
    def probe(cls) -> Availability:
        return versions.vllm_availability()

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> None:
        cls.serving_method(config, draft, folder)
        check_vllm_folder(folder, target, is_cpu_build=versions.is_cpu_build())

    @classmethod
    def check_export(cls, target: TargetSpec, draft: Draft, folder: Path) -> None:
        if cls.name in draft.serving_methods:
            check_vllm_folder(folder, target)

    @classmethod
    def serving_method(cls, config: EngineConfig, draft: Draft, folder: Path) -> str:
        return cast("VllmConfig", config).draft_method or super().serving_method(config, draft, folder)

    def start_program(self, mode: Mode) -> VllmProcess:
        return VllmProcess(cast("VllmConfig", self.config), self.target, self.context, mode)

    def limit(self, mode: Mode) -> tuple[int, str]:
        return longest(cast("VllmConfig", self.config), self.target, mode), "engine.max_model_len"
