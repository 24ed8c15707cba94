"""Read a target's rotary embeddings from the different forms of config.json, as transformers does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from spec_core.errors import TargetError
from spec_kit.targets.rope_parameters import value_problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spec_kit.targets.target_config import TargetConfig

# Kinds of scaling that need the context length of pre-training. If it is missing, max_positions is used.
_NEED_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")


def target_rope(config: TargetConfig, max_positions: int) -> Mapping[str, Any]:
    """Return the target's rope parameters, empty if it has no rotary embeddings.

    If layers differ, these are the parameters of the layers with full attention.
    """
    if config.described.theta is None:
        return {}
    stored = _stored(config)
    by_layer = any(isinstance(value, dict) for value in stored.values())
    own: object = stored.get("full_attention") if by_layer else stored
    if not isinstance(own, dict):
        raise config.error(
            ("rope_parameters",),
            stored,
            "one set of values, or one for each kind of layer with full_attention",
        )
    rope = _complete(config, dict(cast("dict[str, Any]", own)), max_positions)
    if problem := value_problem(rope):
        raise TargetError(f"{config.file}: {problem}")
    return rope


def _stored(config: TargetConfig) -> dict[str, Any]:
    """Return the field rope_scaling, or else rope_parameters; transformers too prefers the older field."""
    stored = config.section("rope_scaling") or config.section("rope_parameters")
    if config.described.needs_rope and not stored:
        example = '{"rope_type": "default", "rope_theta": …}'
        expected = f"the object of the published {config.model_type} config.json, such as {example}"
        raise config.error(("rope_parameters",), None, expected)
    return stored


def _complete(config: TargetConfig, stored: dict[str, Any], max_positions: int) -> dict[str, Any]:
    described = config.described
    usual_theta = None if described.needs_rope else described.theta
    theta = _first(stored.get("rope_theta"), config.get("rope_theta"), usual_theta)
    if theta is None:
        raise config.error(("rope_theta",), theta, "a positive number")
    old_kind = stored.pop("type", None)
    kind: object = stored.get("rope_type") or old_kind or "default"
    if kind == "mrope":  # it changes the positions of images, not the frequencies
        kind = "default"
    rope: dict[str, Any] = {**stored, "rope_type": kind, "rope_theta": theta}
    partial = _first(
        stored.get("partial_rotary_factor"), config.get("partial_rotary_factor"), described.partial
    )
    if partial is not None:
        rope["partial_rotary_factor"] = partial
    if kind in _NEED_ORIGINAL_LENGTH:
        original = config.integer("original_max_position_embeddings", default=max_positions)
        rope.setdefault("original_max_position_embeddings", original)
    return rope


def _first(*values: object) -> object:
    """Return the first value that is not None, since null in config.json counts as absent."""
    return next((value for value in values if value is not None), None)
