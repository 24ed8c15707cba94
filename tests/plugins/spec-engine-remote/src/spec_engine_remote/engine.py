"""The plugin: when the program starts, and how requests reach it. Imports neither torch nor Transformers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar, cast

from pydantic import Field

from spec_core import EngineConfig
from spec_core.errors import ConfigError
from spec_core.records import AcceptanceCounters, Availability
from spec_kit.hosting import CaptureMode, EngineSubprocess, SubprocessEngine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from spec_core import Draft, TargetSpec
    from spec_core.records import CaptureRequest, GenerationRequest, SamplingParams
    from spec_kit.hosting import Fields, Mode


class RemoteConfig(EngineConfig):
    """Section ``engine`` of a run that names this engine: ``engine.threads=4`` works on the command line."""

    threads: int = Field(1, ge=1)
    """OpenMP threads of the target's process."""


class RemoteEngine(SubprocessEngine):
    """Runs the target by Transformers in a process of its own."""

    name: ClassVar[str] = "remote"
    api_version: ClassVar[int] = 1
    Config: ClassVar[type[EngineConfig]] = RemoteConfig

    @classmethod
    def probe(cls) -> Availability:
        return Availability.of_distribution("transformers")

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> None:
        raise ConfigError("engine 'remote' decodes without a draft; set engine.name to one that speculates")

    def limit(self, mode: Mode) -> tuple[int, str]:
        longest = self.target.max_positions
        if isinstance(mode, CaptureMode):
            longest = min(longest, self.config.batch_tokens)
        return longest, "engine.batch_tokens and the target's max_position_embeddings"

    def start_program(self, mode: Mode) -> RemoteProcess:
        layers = mode.schema.layers if isinstance(mode, CaptureMode) else ()
        target = self.target
        arguments = {"folder": str(target.folder), "dtype": target.dtype, "ends": target.eos_token_ids}
        env = {**os.environ, "OMP_NUM_THREADS": str(cast("RemoteConfig", self.config).threads)}
        return RemoteProcess(self.config, self.context, mode, {**arguments, "layers": layers}, env)


class RemoteProcess(EngineSubprocess):
    """The engine's end of the target's process; ``program.py`` is the other end."""

    program: ClassVar[str] = "the remote target"
    module: ClassVar[str] = "spec_engine_remote.program"
    extension: ClassVar[str] = "its exporter; see its log"
    grace_s: ClassVar[float] = 5.0

    def prefill(self, requests: Sequence[CaptureRequest]) -> Future[Fields]:
        return self.ask("prefill", requests=[[r.request_id, r.destinations, r.input_ids] for r in requests])

    def decode(self, request: GenerationRequest, sampling: SamplingParams) -> Future[Fields]:
        return self.ask("decode", prompt=list(request.prompt), seed=request.seed, sampling=vars(sampling))

    def acceptance(self) -> AcceptanceCounters:
        return AcceptanceCounters()
