"""LlamacppEngine is the engine plugin in which llama.cpp runs the target, from a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, cast

from spec_core import Draft, EngineAbilities, EngineConfig, Serving, TargetSpec
from spec_core.errors import ConfigError, EngineError
from spec_core.records import Availability, FeatureSchema
from spec_engine_llamacpp.config import LlamacppConfig
from spec_engine_llamacpp.process import LlamacppProcess
from spec_engine_llamacpp.serving import VERSIONS, LlamacppServing, target_file
from spec_engine_llamacpp.serving_format import check_llamacpp_folder
from spec_kit.hosting import CaptureMode, Mode, PlainMode, SpeculativeMode, SubprocessEngine, probe_version


class LlamacppEngine(SubprocessEngine):
    """The engine ``llamacpp``: it answers prompts, with a draft or without, and captures no states.

    A draft's folder is written as a temporary GGUF file when the program starts.
    """

    name: ClassVar[str] = "llamacpp"
    api_version: ClassVar[int] = 1
    abilities: ClassVar[EngineAbilities] = EngineAbilities(guess_depths=True)
    Config: ClassVar[type[EngineConfig]] = LlamacppConfig
    serving: ClassVar[Serving | None] = LlamacppServing()

    @classmethod
    def probe(cls) -> Availability:
        """Return whether llama.cpp's server is installed as a Python package."""
        return probe_version(VERSIONS, "xllamacpp")

    @classmethod
    def check_capture(cls, config: EngineConfig, schema: FeatureSchema) -> None:
        """Raise ConfigError: llama.cpp's server hands out no hidden states."""
        raise ConfigError(
            "engine 'llamacpp' captures no hidden states; train with another engine on the folder from which the "
            "GGUF file was made"
        )

    @classmethod
    def check_draft(
        cls, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int
    ) -> None:
        """Raise UsageError if llama.cpp cannot serve the draft, or if the target's file is not known (E8)."""
        target_file(cast("LlamacppConfig", config), target)
        check_llamacpp_folder(folder, target)
        cls.serving_method(config, draft, folder)
        most = draft.max_draft_tokens
        if num_draft_tokens < 1 or (most is not None and num_draft_tokens > most):
            named = "or more" if most is None else f"to {most}"
            raise ConfigError(
                f"{num_draft_tokens} draft tokens are wanted, draft {folder} proposes 1 {named}"
            )

    def start_program(self, mode: Mode) -> LlamacppProcess:
        """Start llama.cpp's server in a separate process.

        Raise EngineError if it is to capture, TargetError if the target's file is no conversion of its folder.
        """
        from spec_engine_llamacpp.target_gguf import read_target_gguf

        if isinstance(mode, CaptureMode):
            raise EngineError(f"engine {self.name!r} captures no hidden states")
        config = cast("LlamacppConfig", self.config)
        file = target_file(config, self.target)
        # With a draft, the target's file is checked as the draft's is written.
        if isinstance(mode, PlainMode):
            read_target_gguf(file, self.target)
        return LlamacppProcess(config, self.target, self.context, mode, file)

    def limit(self, mode: Mode) -> tuple[int, str]:
        """Return the maximum number of tokens of a request, and the name of the setting that limits it."""
        drafted = mode.num_draft_tokens if isinstance(mode, SpeculativeMode) else 0
        longest = min(cast("LlamacppConfig", self.config).context, self.target.max_positions)
        return longest - drafted, "engine.context and the target's max_position_embeddings"
