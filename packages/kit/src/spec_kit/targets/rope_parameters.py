"""Check a draft's Hugging Face ``rope_parameters``, and read and write them in a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
}


_POSITIVE = ("rope_theta", "partial_rotary_factor", *_NEEDS["llama3"])
_NUMBERS = (*_POSITIVE, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_USUAL = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
}
_LARGEST = 2**53  # a float holds every smaller integer exactly


_OF_IMAGES = frozenset({"mrope_section", "mrope_interleaved"})
"""Keys by which a multimodal target numbers the positions of images; a draft's positions are token indices."""
_ROTATED = frozenset({"partial_rotary_factor", "rope_dim"})
"""Keys for the number of rotated channels. SGLang rotates all channels of a draft, whatever its config.json says."""


def draft_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a draft's default rope parameters for a target with the rope parameters ``rope``.

    They are the target's parameters, but all channels are rotated. So Gemma 4's type ``proportional``, which leaves
    most channels unrotated, becomes the type ``default`` with the same base.
    """
    own = {key: value for key, value in rope.items() if key not in _OF_IMAGES | _ROTATED}
    if own.get("rope_type") == "proportional":
        own |= {"rope_type": "default"}
    return own


def value_problem(rope: Mapping[str, Any]) -> str | None:
    """Return which value has an invalid type or sign, as an error message, or None; null counts as absent."""
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str):
        return f"rope_type={kind!r:.80}, expected a name"
    for key in _NUMBERS:
        value: Any = rope.get(key, 1)
        number = type(value) in (int, float) and abs(value) <= _LARGEST
        if value is not None and not (number and (value > 0 or key not in _POSITIVE)):
            expected = "a positive number" if key in _POSITIVE else "a number"
            return f"{key}={value!r:.80}, expected {expected}"
    return None


def rope_problem(rope: Mapping[str, Any], head_dim: int) -> str | None:
    """Return why a draft cannot use the rotary embeddings ``rope``, or None."""
    if problem := value_problem(rope):
        return problem
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _NEEDS:
        return f"rotary embedding type {kind!r} is not supported (supported: {', '.join(_NEEDS)})"
    if missing := [key for key in _NEEDS[kind] if rope.get(key) is None]:
        return f"rotary embedding type {kind!r} lacks {', '.join(missing)}"
    if any(isinstance(value, dict) for value in rope.values()):
        return "rotary embeddings that differ between layer types are not supported"
    rotated = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    even = f"rotary embeddings over {rotated} of {head_dim} channels: an even number is needed"
    return even if rotated % 2 else None


def read_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` of a config.json, or compute them from an older file's separate fields.

    Older files have ``rope_theta`` and ``rope_scaling``. In any of them null means the same as an absent value.
    """
    stored: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope = {key: value for key, value in stored.items() if value is not None}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if fields.get(key) is not None:
            rope.setdefault(key, fields[key])
    return rope


def rotary_values(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values that the rotations depend on; an absent value is its default, or None without a default."""
    found = {key: rope.get(key) for key in ("rope_type", *_NUMBERS, "truncate")}
    return {key: _USUAL.get(key) if value is None else value for key, value in found.items()}


def rope_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json: ``rope_parameters``, and the older fields with the same values."""
    whole = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    partial = whole.get("partial_rotary_factor")
    scaling = {
        key: value for key, value in whole.items() if key not in ("rope_theta", "partial_rotary_factor")
    }
    return {
        "rope_parameters": whole,
        "rope_theta": whole["rope_theta"],
        "rope_scaling": None if whole["rope_type"] == "default" else scaling,
        **({} if partial is None else {"partial_rotary_factor": partial}),
    }
