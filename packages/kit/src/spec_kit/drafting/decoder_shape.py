"""Define the sizes of a draft of Llama-style decoder layers, and read and write them in config.json.

Importing this module imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from spec_core import DraftConfig, TargetSpec
from spec_kit.drafting.draft_files import Json, Shapes, Size, section
from spec_kit.drafting.draft_shape import DraftShape
from spec_kit.sharding import TensorParallelHints
from spec_kit.targets.rope_parameters import draft_rope, read_rope, rope_fields, rope_problem, rotary_values


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"{list(layers)} must be unique and ascending, as both engines capture them")
    return layers


CapturedLayers = Annotated[tuple[int, ...], pydantic.AfterValidator(_ascending)]
"""Option of a draft: ids of the captured residual streams; stream k enters layer k of the target."""
DistilledLoss = Literal["ce", "lk_alpha", "lk_lambda"]
"""Option of a draft: its loss against the target's distribution."""
FP8_MULTIPLE = 16
"""Sizes of a weight in an fp8 product must be multiples of this number (torch's ``scaled_mm`` on GPUs)."""


class DecoderConfig(DraftConfig):
    """Options of a draft that is made of decoder layers: sizes that may differ from the target's."""

    intermediate_size: int | None = Field(None, ge=1)
    """Width of the draft's MLP. None means the target's value, also in the options of the heads."""
    num_heads: int | None = Field(None, ge=1)
    """Query heads of the draft's attention."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key-value heads of the draft's attention."""
    head_dim: int | None = Field(None, ge=2)
    """Channels of one head."""


class DecoderShape(DraftShape):
    """The shape of a draft made of decoder layers; see DraftShape."""

    intermediate_size: Size
    num_heads: Size = Field(alias="num_attention_heads")
    num_kv_heads: Size = Field(default_factory=lambda sizes: sizes["num_heads"], alias="num_key_value_heads")
    head_dim: Size = Field(default_factory=lambda sizes: sizes["hidden_size"] // sizes["num_heads"])
    norm_eps: float = Field(1e-6, gt=0, alias="rms_norm_eps")
    rope: Json
    """Hugging Face ``rope_parameters``."""
    max_positions: Size = Field(2048, alias="max_position_embeddings")

    @classmethod
    def for_target(cls, config: DecoderConfig, target: TargetSpec, **own: object) -> Self:
        """Return a fresh draft's shape.

        A size that is not among the keyword arguments ``own`` comes from the options ``config`` or else from
        the target.
        """
        sizes: dict[str, object] = {
            "intermediate_size": config.intermediate_size or target.intermediate_size,
            "num_heads": config.num_heads or target.num_heads,
            "num_kv_heads": config.num_kv_heads or target.num_kv_heads,
            "head_dim": config.head_dim or target.head_dim,
            "norm_eps": target.norm_eps,
            "rope": draft_rope(target.rope),
            "max_positions": target.max_positions,
        }
        return super().for_target(config, target, **{**sizes, **own})

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return the rotary embeddings' parameters, which config.json stores in an older or a newer form."""
        for key in ("rope_parameters", "rope_scaling"):
            section(fields, key, folder)
        return {"rope": read_rope(fields)}

    @property
    def rotary_values(self) -> Json:
        """All values that the rotations depend on, with their defaults."""
        return rotary_values(self.rope)

    @property
    def inner_values(self) -> int:
        """Least number of values inside a layer that the backward pass needs for each row.

        They are the queries, the attention's output, and three vectors of the MLP's width.
        """
        return 2 * self.num_heads * self.head_dim + 3 * self.intermediate_size

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Number of heads of a token's keys and values, and number of channels of each key."""
        return self.num_kv_heads, self.head_dim

    @property
    def value_width(self) -> int:
        """Number of channels of each head of values."""
        return self.head_dim

    def layer_shapes(self, inputs: int) -> Shapes:
        """Return the name and shape of each tensor of a decoder layer: attention, Mlp, and their input norms.

        ``inputs``: channels of the attention's input.
        """
        h, wide = self.hidden_size, self.intermediate_size
        attention = self.attention_shapes(inputs)
        return {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            **{f"self_attn.{name}": shape for name, shape in attention.items()},
            "mlp.gate_proj.weight": (wide, h),
            "mlp.up_proj.weight": (wide, h),
            "mlp.down_proj.weight": (h, wide),
        }

    def attention_shapes(self, inputs: int) -> Shapes:
        """Return name and shape of each tensor of AttentionProjections. ``inputs``: its input channels."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj.weight": (q, inputs),
            "k_proj.weight": (kv, inputs),
            "v_proj.weight": (kv, inputs),
            "o_proj.weight": (self.hidden_size, q),
        }

    def layer_hints(self, layer: str) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the decoder layer at the module path ``layer``.

        The layer has the modules of ``layer_shapes``.
        """
        mlp = f"{layer}.mlp"
        norm = f"{layer}.post_attention_layernorm"
        inner = self.intermediate_size
        own = TensorParallelHints(
            columns={f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner},
            rows={f"{mlp}.down_proj": inner},
            enters=(norm,),
            leaves=(mlp,),
            each_token=(norm,),
        )
        attention = self.attention_hints(f"{layer}.self_attn")
        return attention + self.norm_hints(f"{layer}.input_layernorm") + own

    def attention_hints(self, attention: str) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the attention at the module path ``attention``."""
        return TensorParallelHints(
            columns={
                f"{attention}.q_proj": self.num_heads,
                f"{attention}.k_proj": self.num_kv_heads,
                f"{attention}.v_proj": self.num_kv_heads,
            },
            replicated=(f"{attention}.k_proj", f"{attention}.v_proj"),
            rows={f"{attention}.o_proj": self.num_heads},
            leaves=(f"{attention}.o_proj",),
        )

    def norm_hints(self, norm: str) -> TensorParallelHints:
        """Return how tensor-parallel ranks handle the norm before an attention. ``norm``: its module path."""
        return TensorParallelHints(enters=(norm,), each_token=(norm,))

    def fixed_fields(self) -> Json:
        """Return fields of config.json for which a draft of decoder layers supports only the given value."""
        return {
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "logit_scale": 1.0,
            "target_hidden_size": self.hidden_size,
        }

    def problem(self) -> str | None:
        """Return why no decoder layer can have this shape, or None."""
        if self.num_heads % self.num_kv_heads:
            return f"{self.num_heads} attention heads are no multiple of {self.num_kv_heads} key-value heads"
        return rope_problem(self.rope, self.head_dim)


def decoder_fields(shape: DecoderShape) -> Json:
    """Return the fields of config.json that describe a decoder layer."""
    return {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
    }


def end_fields(shape: DecoderShape, target: TargetSpec) -> Json:
    """Return the fields of config.json for end tokens (a number, a list, or absent) and rotary embeddings."""
    ends = list(target.eos_token_ids)
    return {
        **({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}),
        **rope_fields(shape.rope),
    }
