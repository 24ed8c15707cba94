"""LlamacppServing says how users serve drafts with ``llama-server``, and writes drafts as GGUF files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import ClassVar, Self, cast

from spec_core import Draft, EngineConfig, Serving, TargetSpec
from spec_core.errors import ConfigError
from spec_core.records import Availability, ServerCounters
from spec_engine_llamacpp.config import LlamacppConfig
from spec_engine_llamacpp.server_counters import llamacpp_counters
from spec_engine_llamacpp.serving_format import check_llamacpp_export, check_llamacpp_folder, check_planned
from spec_kit.hosting import probe_version

VERSIONS = ">=2026.10"
"""The versions of xllamacpp, which has llama.cpp's server, that know every kind of draft."""
_NAME = "llamacpp"
_UNKNOWN = "TARGET.gguf"
"""Stands in a command for the target's GGUF file if it is not in the target's folder."""


class LlamacppServing(Serving):
    """Unmodified llama.cpp, which loads a target and a draft from a GGUF file each."""

    formats: ClassVar[frozenset[str]] = frozenset({"gguf"})

    def __init__(self, gguf: Path | None = None) -> None:
        """Set the target's GGUF file that commands name; None means the one in the target's folder."""
        self._gguf = gguf

    def check_export(self, target: TargetSpec, draft: Draft, folder: Path) -> None:
        """Raise ArtifactError if llama.cpp could serve the export for no target.

        What it cannot serve for this target alone does not refuse an export, which other engines may serve.
        """
        check_llamacpp_export(folder, target)

    def availability(self, target: TargetSpec, draft: Draft) -> Availability:
        """Return whether llama.cpp's server is installed as a Python package (V2)."""
        if _NAME not in draft.serving_methods:
            raise ConfigError(f"it does not serve draft {draft.name!r} with these options")
        check_planned(draft, target)
        return probe_version(VERSIONS, "xllamacpp")

    def configured(self, config: EngineConfig) -> Self:
        """Return a Serving whose commands name the target's file ``engine.gguf``, if it is given."""
        return type(self)(cast("LlamacppConfig", config).gguf)

    def command(self, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int) -> str:
        """Return the shell command that writes the draft as a GGUF file and starts a server with it."""
        check_llamacpp_folder(folder, target)
        found = [self._gguf] if self._gguf else sorted(target.folder.glob("*.gguf"))
        file = str(found[0]) if len(found) == 1 else _UNKNOWN
        output = f"{folder}.gguf"
        words = ["spec-trainer", "convert", "--draft-model", str(folder), "--target", str(target.folder)]
        words += ["--format", "gguf", "--output", output, f"engine.gguf={file}"]
        return f"{shlex.join(words)} && {_server(file, output, draft, num_draft_tokens)}"

    def counters(self, metrics: str) -> ServerCounters | None:
        """Return the counters of a llama.cpp server from its metrics; None for another program."""
        return llamacpp_counters(metrics)

    def write(
        self, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, output: Path
    ) -> str:
        """Write the draft as a GGUF file; return the command of a server that loads it (V6)."""
        from spec_engine_llamacpp.draft_gguf import write_draft_gguf

        own = cast("LlamacppConfig", config)
        file = target_file(own, target)
        write_draft_gguf(folder, target, file, output, own.draft_type)
        return _server(str(file), str(output), draft, draft.default_draft_tokens)


def target_file(config: LlamacppConfig, target: TargetSpec) -> Path:
    """Return the target's GGUF file. Raise ConfigError if there is none, or one of several."""
    found = [config.gguf] if config.gguf is not None else sorted(target.folder.glob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(
            f"target {target.folder} has {len(found)} GGUF files; set engine.gguf to the file into which llama.cpp's "
            "convert_hf_to_gguf.py has converted this folder"
        )
    if not found[0].is_file():
        raise ConfigError(f"engine.gguf={found[0]}: there is no such file")
    return found[0]


def _server(target: str, draft_file: str, draft: Draft, num_draft_tokens: int) -> str:
    """Return the shell command of a server with the draft in a GGUF file."""
    method = draft.serving_methods[_NAME]
    words = ["llama-server", "-m", target, "-md", draft_file, "--spec-type", method]
    return shlex.join([*words, "--spec-draft-n-max", str(num_draft_tokens), "--metrics"])
