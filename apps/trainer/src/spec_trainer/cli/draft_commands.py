"""This module defines the commands that write drafts: export and convert. It imports no torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from cyclopts import Parameter

from spec_trainer.base.words import check_overrides
from spec_trainer.cli.documents import print_text
from spec_trainer.cli.examples import EXAMPLES
from spec_trainer.cli.log_flags import LogFlags

Format = Annotated[str | None, Parameter(name="--format")]

_LOGS = LogFlags()


def export_command(
    *overrides: str,
    checkpoint: Path,
    output: Path,
    target: str | None = None,
    whole_target: bool = False,
    file_format: Format = None,
    dtype: str | None = None,
    prompts: Path | None = None,
    push_to_hub: str | None = None,
    logs: LogFlags = _LOGS,
) -> None:
    """Export a checkpoint as a draft folder that vLLM and SGLang load, or in another format.

    Parameters
    ----------
    overrides
        Options of the engine that writes the format, such as engine.KEY=VALUE.
    checkpoint
        A step-N folder of a run.
    output
        Folder or file to write; must not exist.
    target
        Folder of the target, if it was moved since the training.
    whole_target
        Write a copy of the target with the draft inside, for a draft that is part of its target (an MTP head).
    file_format
        Format of an engine's own: gguf, one file for llama.cpp, or speculators, a folder that vllm serve takes alone.
    dtype
        Write the matrices of the draft's layers in 8 bits, int8 or fp8, for the engines that load them.
    prompts
        Data file by whose prompts the acceptance length is measured with and without dtype.
    push_to_hub
        Repository of the Hugging Face hub, owner/name, to send the folder to; a new one is private.
    """
    check_overrides(overrides, list(EXAMPLES))
    from spec_trainer.base.hub import check_upload, upload_folder
    from spec_trainer.cli.commands.export import export_checkpoint
    from spec_trainer.cli.commands.formats import read_format
    from spec_trainer.plan import combinations
    from spec_trainer.run.serving import closing_lines

    wanted = read_format(file_format, overrides)
    given = SimpleNamespace(
        whole_target=whole_target, format=file_format, dtype=dtype, prompts=prompts, push_to_hub=push_to_hub
    )
    combinations.refuse(combinations.EXPORT, given, wanted)
    quantisation = None
    if dtype is not None:
        from spec_trainer.cli.commands.quantised import Quantisation

        quantisation = Quantisation(dtype, prompts)
    if push_to_hub is not None:
        check_upload(push_to_hub)
    exported = export_checkpoint(
        checkpoint, output, target, whole_target=whole_target, file_format=wanted, quantisation=quantisation
    )
    lines = (f"draft: {exported['draft']}", *exported.get("notes", ()), *closing_lines(exported))
    print_text("\n".join(lines))
    if push_to_hub is not None:
        print_text(f"on the hub: {upload_folder(output, push_to_hub)}")


def convert(
    *overrides: str,
    draft_model: Path,
    target: str,
    output: Path,
    file_format: Format = None,
    logs: LogFlags = _LOGS,
) -> None:
    """Write a draft of speculators, SpecForge or AngelSlim as vLLM and SGLang load it, or any in another format.

    Parameters
    ----------
    overrides
        Options of the engine that writes the format, such as engine.KEY=VALUE.
    draft_model
        Folder of the draft.
    target
        Folder or hub id of its target.
    output
        Folder or file to write; must not exist.
    file_format
        Format of an engine's own: gguf, one file for llama.cpp, or speculators, a folder that vllm serve takes alone.
    """
    check_overrides(overrides, list(EXAMPLES))
    from spec_trainer.cli.commands.convert import convert_draft
    from spec_trainer.cli.commands.formats import read_format
    from spec_trainer.run.serving import command_lines

    serve = convert_draft(draft_model, target, output, read_format(file_format, overrides))
    print_text("\n".join((f"draft: {output}", *command_lines(serve))))
