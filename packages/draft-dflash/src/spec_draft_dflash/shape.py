"""DraftShape: everything that fixes a draft's tensors and arithmetic; its reading of a served config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from spec_core.drafting.decoder_format import decoder_problem, read_rope_fields
from spec_core.drafting.served_draft import ConfigReader, Json, Shapes
from spec_draft_dflash.config import LayerType
from spec_draft_dflash.mask_token import choose_mask_token

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spec_core.target import TargetSpec
    from spec_draft_dflash.config import DFlashConfig

FULL, SLIDING = get_args(LayerType)

# What a served draft may ask for, top-level or in dflash_config, and this one does not do; with the unused value.
_NOT_EXPRESSED: Json = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_aux_hidden_state": True,
    "use_swa": False,
    "use_gemma_norm": False,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": None,
    "sample_from_anchor": False,
    "projector_type": None,
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
}
# Of the target's: which channels turn, and by what for images. SGLang 0.5.16 turns all channels whatever a DFlash
# config says, so a fresh draft does; a draft sees text positions only.
_ROPE_NOT_COPIED = frozenset({"partial_rotary_factor", "rope_dim", "mrope_section", "mrope_interleaved"})


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """Sizes of one DFlash draft. Hidden size and vocabulary are its target's."""

    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    """Positions that a sliding layer sees, the query's own included; None without such layers."""
    block_size: int
    mask_token_id: int
    layers: tuple[int, ...]
    """Captured residual streams: those entering these layers of the target."""
    num_target_layers: int | None
    """None: a published draft does not say."""
    norm_eps: float
    rope: Mapping[str, Any]
    """Hugging Face ``rope_parameters``."""
    max_positions: int

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_features(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer; None: full attention."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def is_causal(self) -> bool | None:
        """Whether blocks are causal inside; None where layers differ."""
        kinds = set(self.layer_types)
        return None if len(kinds) > 1 else kinds == {SLIDING}

    def tensor_shapes(self) -> Shapes:
        """Every trained tensor of the draft under its name in the module and in the exported file."""
        h, wide, dim = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * dim, self.num_kv_heads * dim
        layer: Shapes = {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            "self_attn.q_proj.weight": (q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
            "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,),
            "mlp.gate_proj.weight": (wide, h),
            "mlp.up_proj.weight": (wide, h),
            "mlp.down_proj.weight": (h, wide),
        }
        shapes: Shapes = {"fc.weight": (h, self.num_features * h), "hidden_norm.weight": (h,)}
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes | {"norm.weight": (h,)}

    @classmethod
    def for_target(cls, config: DFlashConfig, target: TargetSpec) -> DraftShape:
        """A fresh draft's shape: the options, else the defaults, else the target's own."""
        kind = FULL if config.sliding_window is None else SLIDING
        mask_token_id = config.mask_token_id
        return cls(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            intermediate_size=config.intermediate_size or target.intermediate_size,
            num_heads=config.num_heads or target.num_heads,
            num_kv_heads=config.num_kv_heads or target.num_kv_heads,
            head_dim=config.head_dim or target.head_dim,
            layer_types=config.layer_types or (kind,) * (config.num_layers or 5),
            sliding_window=config.sliding_window,
            block_size=config.block_size or 16,
            mask_token_id=choose_mask_token(target) if mask_token_id is None else mask_token_id,
            layers=config.layers or default_layers(target.num_layers, config.num_features or 5),
            num_target_layers=target.num_layers,
            norm_eps=target.norm_eps,
            rope={key: value for key, value in target.rope.items() if key not in _ROPE_NOT_COPIED},
            max_positions=target.max_positions,
        )

    @classmethod
    def from_json(cls, fields: Json, folder: Path) -> DraftShape:
        """The shape that a served config.json describes. Raises ArtifactError where this draft cannot be it."""
        top = ConfigReader(fields, folder)
        own = ConfigReader({**fields, **_present(top.section("dflash_config"))}, folder)
        heads, hidden = top.size("num_attention_heads"), top.size("hidden_size")
        types = _read_layer_types(top)
        shape = cls(
            hidden_size=hidden,
            vocab_size=top.size("vocab_size"),
            intermediate_size=top.size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=top.size("num_key_value_heads", heads),
            head_dim=top.size("head_dim", hidden // heads),
            layer_types=types,
            sliding_window=_read_window(types, own),
            block_size=own.size("block_size", 16),
            mask_token_id=own.number("mask_token_id"),
            layers=_read_layers(own, top.size("num_hidden_layers")),
            num_target_layers=own.size("num_target_layers") if own.has("num_target_layers") else None,
            norm_eps=top.positive("rms_norm_eps", 1e-6),
            rope=read_rope_fields(top),
            max_positions=top.size("max_position_embeddings", 32768),
        )
        _refuse_foreign_options(own, shape)
        if problem := shape.problem():
            raise top.error(problem)
        return shape

    def problem(self) -> str | None:
        """Why no draft can have this shape, or None."""
        window = self.sliding_window
        if SLIDING in self.layer_types and (window is None or window < self.block_size):
            return (
                f"sliding layers with sliding_window={window}: at least a block, {self.block_size}, is needed"
            )
        if self.block_size < 2:
            return f"block_size={self.block_size} leaves no slot to guess"
        if self.mask_token_id >= self.vocab_size:
            return f"mask_token_id={self.mask_token_id} is not below the vocabulary's {self.vocab_size}"
        return decoder_problem(self)


def default_layers(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """The DFlash paper's choice, evenly from the second layer's output to that of the fourth last."""
    n = num_target_layers
    if num_features == 1:
        return (n // 2 + 1,)
    # The output's number is rounded, as SGLang does it: a half goes to the even one.
    return tuple(1 + round(1 + i * (n - 4) / (num_features - 1)) for i in range(num_features))


def _present(fields: Json) -> Json:
    return {key: value for key, value in fields.items() if value is not None}


def _read_layer_types(top: ConfigReader) -> tuple[str, ...]:
    types = top.fields.get("layer_types") or [FULL] * top.size("num_hidden_layers")
    if not isinstance(types, list) or any(kind not in (FULL, SLIDING) for kind in types):
        raise top.error(f"layer_types={types!r}, expected a list of {FULL} and {SLIDING}")
    return tuple(types)


def _read_window(types: tuple[str, ...], own: ConfigReader) -> int | None:
    """None without sliding layers, whatever the config says: base configurations carry a window that nobody uses."""
    if SLIDING not in types:
        return None
    return own.size("swa_window_size" if own.has("swa_window_size") else "sliding_window")


def _read_layers(own: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Ids k, from ``target_layer_ids`` (which name the outputs of layers k − 1) or vLLM's top-level list (k itself);
    without either, as SGLang does, the default for as many features as layers."""
    outputs, entering = own.ids("target_layer_ids"), own.ids("eagle_aux_hidden_state_layer_ids")
    shifted = None if outputs is None else tuple(layer + 1 for layer in outputs)
    found = {ids for ids in (shifted, entering) if ids is not None}
    if not found:
        return default_layers(own.size("num_target_layers"), num_layers)
    if len(found) > 1:
        raise own.error(
            f"target_layer_ids {outputs} and eagle_aux_hidden_state_layer_ids {entering} disagree"
        )
    layers = found.pop()
    if list(layers) != sorted(set(layers)):
        raise own.error(f"captured layers {list(layers)} must be unique and ascending")
    return layers


def _refuse_foreign_options(own: ConfigReader, shape: DraftShape) -> None:
    plain = {
        **_NOT_EXPRESSED,
        "num_hidden_layers": shape.num_layers,
        "target_hidden_size": shape.hidden_size,
        "draft_vocab_size": shape.vocab_size,
    }
    for key, value in plain.items():
        if own.fields.get(key) not in (None, value):
            raise own.error(f"{key}={own.fields[key]!r}; only {value!r} can be trained and served here")
    _refuse_foreign_causality(own, shape)


def _refuse_foreign_causality(own: ConfigReader, shape: DraftShape) -> None:
    """An explicit flag, in the order in which engines look for one, must say what the layer types say."""
    for key in ("is_causal", "causal"):
        flag = own.fields.get(key)
        if flag is not None and flag != shape.is_causal:
            raise own.error(
                f"{key}={flag!r} with layers {', '.join(sorted(set(shape.layer_types)))}; full layers look both ways "
                "inside a block here, sliding ones do not"
            )


FIXED_OPTIONS = (
    "block_size",
    "num_layers",
    "layer_types",
    "sliding_window",
    "mask_token_id",
    "num_features",
    "layers",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)
"""What a published draft has decided."""
