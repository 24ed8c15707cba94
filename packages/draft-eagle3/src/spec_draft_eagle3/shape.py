"""DraftShape: everything that fixes a draft's tensors and arithmetic, and its form as a served config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_core.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spec_core.target import TargetSpec
    from spec_draft_eagle3.config import Eagle3Config

Json = dict[str, Any]

# What a served draft may ask for and this one does not do, with the value that means "not used".
_NOT_EXPRESSED: Json = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "norm_before_residual": False,
    "norm_before_fc": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "tie_word_embeddings": False,
}
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
}


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """Sizes of one Eagle3 draft. H, V: hidden size and vocabulary of its target."""

    hidden_size: int
    target_vocab_size: int
    vocab_size: int
    """Rows V' of the draft's head; equal to ``target_vocab_size`` without a reduced vocabulary."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[int, ...] | None
    """Captured layers; None: the default three."""
    fc_norm: bool
    norm_output: bool
    norm_eps: float
    rope: Mapping[str, Any]
    """Hugging Face ``rope_parameters``."""
    max_positions: int

    @property
    def reduced(self) -> bool:
        return self.vocab_size < self.target_vocab_size

    @property
    def num_captured(self) -> int:
        return 3 if self.layers is None else len(self.layers)

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """The captured layers: residual streams entering these layers of the target."""
        n = num_target_layers
        return (2, n // 2, n - 3) if self.layers is None else self.layers

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every trained tensor of the draft under its name in the module and in the exported file."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, self.num_captured * h),
            "midlayer.input_layernorm.weight": (h,),
            "midlayer.hidden_norm.weight": (h,),
            "midlayer.post_attention_layernorm.weight": (h,),
            "midlayer.self_attn.q_proj.weight": (q, 2 * h),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
            "midlayer.self_attn.o_proj.weight": (h, q),
            "midlayer.mlp.gate_proj.weight": (self.intermediate_size, h),
            "midlayer.mlp.up_proj.weight": (self.intermediate_size, h),
            "midlayer.mlp.down_proj.weight": (h, self.intermediate_size),
            "norm.weight": (h,),
            "lm_head.weight": (self.vocab_size, h),
        }
        chunks = range(self.num_captured) if self.fc_norm else ()
        return shapes | {f"fc_norm.{chunk}.weight": (h,) for chunk in chunks}

    @classmethod
    def for_target(cls, config: Eagle3Config, target: TargetSpec) -> DraftShape:
        """A fresh draft's shape: the options, else the target's own."""
        return cls(
            hidden_size=target.hidden_size,
            target_vocab_size=target.vocab_size,
            vocab_size=config.vocab_size or target.vocab_size,
            intermediate_size=config.intermediate_size or target.intermediate_size,
            num_heads=config.num_heads or target.num_heads,
            num_kv_heads=config.num_kv_heads or target.num_kv_heads,
            head_dim=config.head_dim or target.head_dim,
            layers=config.layers,
            fc_norm=bool(config.fc_norm),
            norm_output=bool(config.norm_output),
            norm_eps=target.norm_eps,
            rope=target.rope,
            max_positions=target.max_positions,
        )

    @classmethod
    def from_json(cls, fields: Json, folder: Path) -> DraftShape:
        """The shape that a served config.json describes. Raises ArtifactError where this draft cannot be it."""
        read = _Sizes(fields, folder)
        heads, hidden = read("num_attention_heads"), read("hidden_size")
        shape = cls(
            hidden_size=hidden,
            target_vocab_size=read("vocab_size"),
            vocab_size=read("draft_vocab_size", read("vocab_size")),
            intermediate_size=read("intermediate_size"),
            num_heads=heads,
            num_kv_heads=read("num_key_value_heads", heads),
            head_dim=read("head_dim", hidden // heads),
            layers=_read_layers(fields, folder),
            fc_norm=bool(fields.get("fc_norm", False)),
            norm_output=bool(fields.get("norm_output", False)),
            norm_eps=fields.get("rms_norm_eps", 1e-6),
            rope=_read_rope(fields),
            max_positions=read("max_position_embeddings", 2048),
        )
        _refuse_foreign_options(fields, folder)
        if problem := shape.problem():
            raise ArtifactError(f"{folder / 'config.json'}: {problem}")
        return shape

    def problem(self) -> str | None:
        """Why no draft can have this shape, or None."""
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} attention heads are no multiple of {self.num_kv_heads} key-value heads"
        if self.vocab_size > self.target_vocab_size:
            return f"a draft vocabulary of {self.vocab_size} exceeds the target's {self.target_vocab_size}"
        return rope_problem(self.rope, self.head_dim)

    def require_agreement(self, config: Eagle3Config) -> None:
        """Raises ConfigError if an option contradicts this published draft (``layers``: see ``check_target``)."""
        for key in _FIXED_OPTIONS:
            wanted, found = getattr(config, key), getattr(self, key)
            if wanted is not None and wanted != found:
                raise ConfigError(
                    f"draft.{key}={wanted!r} contradicts draft.init_from={config.init_from}, whose value is {found!r}"
                )


_FIXED_OPTIONS = (
    "vocab_size",
    "fc_norm",
    "norm_output",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


@dataclass(frozen=True)
class _Sizes:
    """Reads positive integers of a config.json; null counts as absent."""

    fields: Json
    folder: Path

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.fields.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise ArtifactError(
                f"{self.folder / 'config.json'}: {key}={value!r}, expected a positive integer"
            )
        return value


def rope_problem(rope: Mapping[str, Any], head_dim: int) -> str | None:
    """Why the draft cannot copy these rotary embeddings, or None."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_NEEDS:
        return f"rotary embedding type {kind!r} is not supported (supported: {', '.join(_ROPE_NEEDS)})"
    if missing := [key for key in _ROPE_NEEDS[kind] if key not in rope]:
        return f"rotary embedding type {kind!r} lacks {', '.join(missing)}"
    if any(isinstance(value, dict) for value in rope.values()):
        return "rotary embeddings that differ between layer types are not supported"
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    even = f"rotary embeddings over {rotated} of {head_dim} channels: an even number is needed"
    return even if rotated % 2 else None


def _refuse_foreign_options(fields: Json, folder: Path) -> None:
    nested = fields.get("eagle_config") or {}
    for key, plain in _NOT_EXPRESSED.items():
        value = fields.get(key, nested.get(key, plain))
        if value != plain:
            raise ArtifactError(
                f"draft {folder} has {key}={value!r}; only {plain!r} can be trained and served here"
            )
    width, hidden = fields.get("target_hidden_size"), fields.get("hidden_size")
    if width not in (None, hidden):
        raise ArtifactError(
            f"draft {folder} has target_hidden_size={width!r}, expected its hidden_size {hidden!r}"
        )


def _read_layers(fields: Json, folder: Path) -> tuple[int, ...] | None:
    """Top-level ids are k, nested ones k − 1 (``export.py`` says which engine reads which)."""
    name = "eagle_aux_hidden_state_layer_ids"
    top, nested = fields.get(name), (fields.get("eagle_config") or {}).get(name)
    found = {tuple(top)} if top else set[tuple[int, ...]]()
    if nested:
        found.add(tuple(layer + 1 for layer in nested))
    if len(found) > 1:
        raise ArtifactError(
            f"draft {folder}: {name} {top} and eagle_config's {nested} do not name the same layers"
        )
    return found.pop() if found else None


def _read_rope(fields: Json) -> Json:
    """``rope_parameters`` of today, or ``rope_theta`` with ``rope_scaling`` of older files."""
    rope: Json = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if fields.get(key) is not None:
            rope.setdefault(key, fields[key])
    return rope
