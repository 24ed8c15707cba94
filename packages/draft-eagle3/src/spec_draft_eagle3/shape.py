"""DraftShape: everything that fixes a draft's tensors and arithmetic, and its form as a served config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_core.drafting.decoder_format import decoder_problem, read_rope_fields
from spec_core.drafting.served_draft import ConfigReader, Json, Shapes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spec_core.target import TargetSpec
    from spec_draft_eagle3.config import Eagle3Config

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
    "use_aux_hidden_state": True,
    "logit_scale": 1.0,
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

    def tensor_shapes(self) -> Shapes:
        """Every trained tensor of the draft under its name in the module and in the exported file."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: Shapes = {
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
        reader = ConfigReader(fields, folder)
        read = reader.size
        heads, hidden = read("num_attention_heads"), read("hidden_size")
        shape = cls(
            hidden_size=hidden,
            target_vocab_size=read("vocab_size"),
            vocab_size=read("draft_vocab_size", read("vocab_size")),
            intermediate_size=read("intermediate_size"),
            num_heads=heads,
            num_kv_heads=read("num_key_value_heads", heads),
            head_dim=read("head_dim", hidden // heads),
            layers=_read_layers(reader),
            fc_norm=bool(fields.get("fc_norm", False)),
            norm_output=bool(fields.get("norm_output", False)),
            norm_eps=reader.positive("rms_norm_eps", 1e-6),
            rope=read_rope_fields(reader),
            max_positions=read("max_position_embeddings", 2048),
        )
        _refuse_foreign_options(reader)
        if problem := shape.problem():
            raise reader.error(problem)
        return shape

    def problem(self) -> str | None:
        """Why no draft can have this shape, or None."""
        if self.vocab_size > self.target_vocab_size:
            return f"a draft vocabulary of {self.vocab_size} exceeds the target's {self.target_vocab_size}"
        return decoder_problem(self)


FIXED_OPTIONS = (
    "vocab_size",
    "fc_norm",
    "norm_output",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)
"""What a published draft has decided."""


def _refuse_foreign_options(reader: ConfigReader) -> None:
    fields, nested = reader.fields, reader.section("eagle_config")
    for key, plain in {**_NOT_EXPRESSED, "target_hidden_size": fields["hidden_size"]}.items():
        for value in (fields.get(key), nested.get(key)):
            if value not in (None, plain):
                raise reader.error(f"{key}={value!r}; only {plain!r} can be trained and served here")


def _read_layers(reader: ConfigReader) -> tuple[int, ...] | None:
    """Top-level ids are k, nested ones k − 1 (``export.py`` says which engine reads which)."""
    name = "eagle_aux_hidden_state_layer_ids"
    top = reader.ids(name)
    nested = ConfigReader(reader.section("eagle_config"), reader.folder).ids(name)
    shifted = None if nested is None else tuple(layer + 1 for layer in nested)
    found = {ids for ids in (top, shifted) if ids is not None}
    if len(found) > 1:
        raise reader.error(
            f"{name} {list(top or ())} and eagle_config's {list(nested or ())} do not name the same layers"
        )
    layers = found.pop() if found else None
    if layers is not None and list(layers) != sorted(set(layers)):
        raise reader.error(f"captured layers {list(layers)} must be unique and ascending")
    if layers is not None and reader.size("num_aux_hidden_states", len(layers)) != len(layers):
        raise reader.error(
            f"num_aux_hidden_states={reader.fields['num_aux_hidden_states']}, but {len(layers)} layers are named"
        )
    return layers
