"""``spec-trainer export``: write the draft of a checkpoint as a draft folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import yaml

from spec_core.errors import ArtifactError, ConfigError
from spec_trainer.base.disk import check_writable, not_written, scratch_beside
from spec_trainer.base.hub import resolve_target
from spec_trainer.plan.resolve import resolved_config
from spec_trainer.run.directory import RunDirectory
from spec_trainer.run.draft_trainer import export_draft
from spec_trainer.run.model_card import figures_of_run, write_run_card
from spec_trainer.run.serving import serving_commands
from spec_trainer.training.checkpoint.folder import check_whole
from spec_trainer.training.checkpoint.store import read_weights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from spec_core import Draft, TargetSpec
    from spec_trainer.cli.commands.formats import ExportFormat
    from spec_trainer.cli.commands.quantised import Quantisation


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    target_folder: str | None = None,
    *,
    whole_target: bool = False,
    file_format: ExportFormat | None = None,
    quantisation: Quantisation | None = None,
) -> dict[str, Any]:
    """Write the draft of ``checkpoint`` into ``output``; return path, figures, notes and serving commands.

    ``target_folder``: the new path of the target, if its folder was moved; it must be the target that the draft was
    trained for. ``whole_target``: write a copy of the target with the draft inside. ``file_format``: write it in
    an engine's format. ``quantisation``: how to write the layers' matrices in 8 bits.
    """
    from spec_kit.drafting.draft_folder import recognise
    from spec_kit.targets import read_target
    from spec_kit.targets.target_copy import check_outside

    meta = check_whole(checkpoint)
    if os.path.lexists(output):
        raise ArtifactError(f"output {output} exists; choose a new folder")
    check_writable(output)
    try:
        config, types = resolved_config(checkpoint / "config.yaml")
    except (ConfigError, yaml.YAMLError) as error:
        raise ArtifactError(f"{checkpoint} is not a usable checkpoint: {error}") from error
    target = read_target(resolve_target(target_folder or config.target))
    if target.digest != meta.target_digest:
        raise ArtifactError(
            f"target {target.folder} has digest {target.digest[:12]}, and {checkpoint} was trained on a target of "
            f"digest {meta.target_digest[:12]}: it has changed since then, or is another target, or another version "
            "of spec-trainer wrote the checkpoint; name the right target with --target, or export with that version"
        )
    draft = types["draft"](config.draft)
    draft.check_target(target)
    num_draft_tokens = config.decode.num_draft_tokens or draft.default_draft_tokens
    weights = read_weights(types["strategy"], checkpoint)
    simulated = {"eval_acceptance_length": meta.acceptance_length}
    # In 8 bits the draft has another acceptance length than its training simulated.
    figures: dict[str, Any] = {"draft": str(output), **({} if quantisation else simulated)}
    serve = None
    if whole_target:
        check_outside(target.folder, output)
        _export_inside_target(draft, weights, target, output)
        target = read_target(output)
        draft = recognise(output, target)
    elif file_format is not None:
        serve = file_format.write(draft, weights, target, output, config.data)
    elif quantisation is not None:
        figures |= quantisation.write(draft, weights, target, output, config.data)
    else:
        export_draft(draft, weights, target, output, config.data)
    if not whole_target and output.is_dir():
        of_run = figures_of_run(RunDirectory(checkpoint.absolute().parent.parent).summary, meta.step)
        of_step = {"steps": meta.step, **simulated}
        further = {"In 8 bits": "\n".join(f"- {note}" for note in figures["notes"])} if quantisation else {}
        write_run_card(output, draft, target, config, of_run or of_step, further)
    return figures | {"serve": serve or serving_commands(target, draft, output, num_draft_tokens)}


def _export_inside_target(draft: Draft, weights: dict[str, Tensor], target: TargetSpec, output: Path) -> None:
    """Write a copy of the target's folder with the draft's weights inside."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with scratch_beside(output) as scratch:
        try:
            export_draft(draft, weights, target, scratch / "draft", named=output)
            draft.write_into_target(target, scratch / "draft", scratch / "target")
            (scratch / "target").rename(output)
        except OSError as error:
            raise not_written(f"target {output}", output.parent, error) from error
