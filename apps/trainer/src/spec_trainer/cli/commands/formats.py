"""Write a draft in the format of an engine's program, for the commands ``export`` and ``convert``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from spec_core import Engine, foreign_errors
from spec_core.errors import ArtifactError, ConfigError, PluginError
from spec_core.plugins import find, load_each
from spec_trainer.base.disk import follow_umask, not_written, scratch_beside
from spec_trainer.configuration.chat import write_chat_record
from spec_trainer.configuration.engine_options import read_engine_section
from spec_trainer.run.draft_trainer import export_draft

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from spec_core import Draft, EngineConfig, TargetSpec
    from spec_trainer.configuration.chat import ChatConfig


@dataclass(frozen=True)
class ExportFormat:
    """An engine whose Serving writes the format, and the options of the engine."""

    engine_type: type[Engine]
    config: EngineConfig

    @property
    def is_folder(self) -> bool:
        """Whether the format is a folder's, not a file's."""
        return self.engine_type.serving is not None and self.engine_type.serving.writes_folder

    def write(
        self,
        draft: Draft,
        weights: dict[str, Tensor],
        target: TargetSpec,
        output: Path,
        chat: ChatConfig | None,
    ) -> dict[str, str]:
        """Write the draft's export as ``output``; return the engine and the command that serves it.

        ``chat``: settings by which the training conversations were rendered; saved in a folder.
        """
        output.parent.mkdir(parents=True, exist_ok=True)
        name, serving = self.engine_type.name, self.engine_type.serving
        assert serving is not None
        failure = f"engine {name!r} ({find(Engine, name).owner}) fails to write the export"
        with scratch_beside(output) as scratch:
            try:
                export_draft(draft, weights, target, scratch / "draft", named=output)
                with foreign_errors(PluginError, failure):
                    try:
                        command = serving.write(self.config, target, draft, scratch / "draft", output)
                    except (OSError, SafetensorError) as error:
                        raise not_written(f"draft {output}", output.parent, error) from error
                for file in output.iterdir() if self.is_folder else ():
                    follow_umask(file)
                if self.is_folder and chat is not None:
                    write_chat_record(output, chat)
            except ArtifactError as error:
                # It names the scratch folder, which the user has never seen.
                raise ArtifactError(str(error).replace(f" {scratch / 'draft'} ", " ")) from error
        return {name: command}


def read_format(name: str | None, words: Sequence[str]) -> ExportFormat | None:
    """Return the format called ``name``, with options of its engine from ``section.key=value`` words; None for None.

    Raise ConfigError if no installed engine plugin writes it.
    """
    if name is None:
        if words:
            raise ConfigError(f"{words[0]}: options of an engine need --format, the format that it writes")
        return None
    writers: dict[str, list[type[Engine]]] = {}
    for _, engine_type in load_each(Engine):
        if not isinstance(engine_type, PluginError) and engine_type.serving is not None:
            for known in engine_type.serving.formats:
                writers.setdefault(known, []).append(engine_type)
    match writers.get(name, []):
        case [engine_type]:
            return ExportFormat(engine_type, read_engine_section(engine_type, words))
        case []:
            raise ConfigError(
                f"--format={name}: no engine plugin here writes this format; they write "
                f"{', '.join(sorted(writers)) or 'none'}"
            )
        case several:
            owners = " and ".join(find(Engine, engine_type.name).what for engine_type in several)
            raise ConfigError(f"--format={name} is written by {owners}; uninstall one of them")
