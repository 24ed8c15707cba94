"""VllmEngine is the engine plugin in which unmodified vLLM runs the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, cast

from spec_core import Draft, EngineAbilities, EngineConfig, FrozenProducts, Serving, TargetSpec
from spec_core.errors import ConfigError, TargetError
from spec_core.records import Availability, FeatureSchema
from spec_engine_vllm.arguments import longest
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.process import VllmProcess
from spec_engine_vllm.serving import VllmServing, check_states
from spec_engine_vllm.serving_format import check_vllm_folder
from spec_engine_vllm.target_classes import gives_states
from spec_engine_vllm.versions import has_first_runner, is_before_28, is_cpu_build, probe_vllm
from spec_kit.hosting import Mode, ProgramReplica, SubprocessEngine

_IMAGE_ARGUMENTS = frozenset({"skip_mm_profiling", "mm_processor_kwargs", "limit_mm_per_prompt"})
"""Arguments of vLLM that change the image on which it measures its memory."""


class VllmEngine(SubprocessEngine):
    """The engine ``vllm``: captures through a KV connector, and serves drafts."""

    name: ClassVar[str] = "vllm"
    api_version: ClassVar[int] = 1
    abilities: ClassVar[EngineAbilities] = EngineAbilities(
        fresh_weights=True, guess_depths=True, images=True, image_prompts=True
    )
    Config: ClassVar[type[EngineConfig]] = VllmConfig
    serving: ClassVar[Serving | None] = VllmServing()

    @classmethod
    def probe(cls) -> Availability:
        """Return whether a supported vLLM is installed."""
        return probe_vllm()

    @classmethod
    def check_target(cls, config: EngineConfig, target: TargetSpec) -> None:
        """Raise TargetError if the installed vLLM cannot give the target's hidden states."""
        if not gives_states(target.architecture):
            raise TargetError(
                f"engine {cls.name!r} cannot capture target {target.folder}: vLLM's class {target.architecture} "
                "gives no hidden states; set engine.name=hf or engine.name=sglang"
            )

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> None:
        """Raise UsageError if vLLM cannot serve the draft as configured (E8)."""
        check_states(draft, target)
        check_vllm_folder(
            folder,
            target,
            is_cpu_build=is_cpu_build(),
            is_before_28=is_before_28(),
            has_first_runner=has_first_runner(),
        )
        cls.serving_method(config, draft, folder)

    @classmethod
    def check_capture(cls, config: EngineConfig, schema: FeatureSchema) -> None:
        """Refuse to capture layer 0 on accelerators, because later layers' kernels overwrite the embeddings.

        vLLM stores a reference to the embeddings (``EagleModelMixin``, read in vLLM 0.26 and 0.32), which
        ``fused_add_rms_norm`` changes in place. The CPU build's version does not.
        """
        if 0 in schema.layers and not is_cpu_build():
            raise ConfigError(
                f"engine {cls.name!r} cannot capture the embeddings (layer 0), which this draft reads: vLLM "
                "changes them in place; set engine.name=hf or engine.name=sglang"
            )

    @classmethod
    def runs_largest_image(cls, config: EngineConfig) -> bool:
        """Return whether vLLM measures its memory with the largest image, which arguments can change.

        Source: ``profile_run`` of ``v1/worker/gpu_model_runner.py``, read in 0.26.
        """
        return _IMAGE_ARGUMENTS.isdisjoint(cast("VllmConfig", config).args)

    @classmethod
    def method_of(cls, config: EngineConfig, draft: Draft) -> str | None:
        """Return ``engine.draft_method``, or else the method that the draft names for vLLM."""
        return cast("VllmConfig", config).draft_method or super().method_of(config, draft)

    def start_program(self, mode: Mode) -> VllmProcess:
        """Start vLLM in a separate process."""
        return VllmProcess(cast("VllmConfig", self.config), self.target, self.context, mode)

    def frozen_products(self, token_ids: Sequence[int], vector: Sequence[float]) -> FrozenProducts | None:
        """Return products with the tables in the program's model; None if it cannot compute them (E17)."""
        return self.program_products(token_ids, vector)

    def draft_replica(self, group: str = "default") -> ProgramReplica:
        """Return the replica that updates the draft's weights while vLLM speculates (E10)."""
        return self.program_replica(cast("VllmConfig", self.config).tensor_parallel)

    def limit(self, mode: Mode) -> tuple[int, str]:
        """Return the maximum number of tokens of a request, and the name of the setting that limits it."""
        return longest(cast("VllmConfig", self.config), self.target, mode), "engine.max_model_len"
