"""``spec-trainer convert``: rewrite another project's draft in the layout that vLLM and SGLang load."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from spec_core.errors import ArtifactError
from spec_trainer.base.disk import check_writable
from spec_trainer.base.hub import resolve_target
from spec_trainer.cli.commands.formats import ExportFormat
from spec_trainer.configuration.chat import read_chat_record
from spec_trainer.run.draft_trainer import export_draft
from spec_trainer.run.model_card import write_card

log = logging.getLogger(__name__)


def convert_draft(
    draft_model: Path, target_folder: str, output: Path, file_format: ExportFormat | None = None
) -> dict[str, str]:
    """Write the draft in ``draft_model`` in this project's layout into ``output``; return the commands that serve it.

    The weights are unchanged. ``file_format``: write it in an engine's format. Raise an error if no
    draft plugin recognises the layout, or if the draft does not fit the target.
    """
    from spec_kit.drafting import QUANTISATION, build_module, read_config, recognise
    from spec_kit.drafting.draft_files import check_finite
    from spec_kit.targets.target_copy import check_outside
    from spec_kit.targets.target_reader import read_target, read_target_tensors
    from spec_trainer.run.draft_folder import position_warning

    if os.path.lexists(output):
        raise ArtifactError(f"output {output} exists; choose a new folder")
    check_writable(output)
    target = read_target(resolve_target(target_folder))
    check_outside(target.folder, output)
    draft = recognise(draft_model, target)
    if warning := position_warning(draft, target):
        log.warning("%s", warning)
    if QUANTISATION in (read_config(draft_model) or {}):
        log.warning(
            "draft %s has matrices in 8 bits, and their rounded weights are written; convert the draft as it was "
            "trained if you have it",
            draft_model,
        )
    check_finite(draft_model)
    weights = build_module(draft, target, read_target_tensors(target)).state_dict()
    commands = dict[str, str]()
    chat = read_chat_record(draft_model)
    if file_format is not None:
        commands = file_format.write(draft, weights, target, output, chat)
    else:
        export_draft(draft, weights, target, output, chat)
    if output.is_dir():
        write_card(output, draft, target, draft.default_draft_tokens, {})
    return commands
