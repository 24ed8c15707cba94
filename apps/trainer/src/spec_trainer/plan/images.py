"""Decide whether the rows of a run, and the prompts of an engine, may have images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import TargetError
from spec_trainer.data.image_parts import TEXT_PROMPTS

if TYPE_CHECKING:
    from spec_core import Engine, TargetSpec
    from spec_trainer.configuration.run import AnyRunConfig
    from spec_trainer.data.row_images import ImageRules
    from spec_trainer.run.spec import RunParts


def image_rules(parts: RunParts, *, follows: bool = False) -> ImageRules:
    """Return whether the rows of a run may have images, and, if they may not, the reason."""
    from spec_trainer.data.row_images import NO_IMAGES, ImageRules

    target = parts.target
    if target.image_token_id is None:
        return NO_IMAGES
    if follows:
        return ImageRules.of(target, "follow trains on text alone")
    if parts.config.decodes:
        return ImageRules.of(target, f"with decode.every or train.serve_every, {TEXT_PROMPTS}")
    known = parts.engine_type.abilities.image_types
    engine = parts.engine_type.name
    if known is None or target.model_type in known:
        return ImageRules.of(target, "")
    types = ", ".join(sorted(known))
    return ImageRules.of(target, f"engine {engine!r} takes images for targets of the types {types} alone")


def prompt_image_rules(engine_type: type[Engine], target: TargetSpec) -> ImageRules:
    """Return whether an engine's prompts may have images, and, if they may not, the reason."""
    from spec_trainer.data.row_images import NO_PROMPT_IMAGES, ImageRules

    if target.image_token_id is None:
        return NO_PROMPT_IMAGES
    refused = (
        "" if engine_type.abilities.image_prompts else f"with engine {engine_type.name!r}, {TEXT_PROMPTS}"
    )
    return ImageRules.of(target, refused)


def check_sight(config: AnyRunConfig, engine_type: type[Engine], target: TargetSpec) -> None:
    """Raise TargetError if the target is multimodal and the engine cannot give images to it."""
    if target.image_token_id is not None and not engine_type.abilities.images:
        raise TargetError(
            f"target {target.folder} sees images, which engine {config.engine.name!r} does not capture; choose an "
            "engine that does, such as the default (spec-trainer plugins lists them)"
        )
