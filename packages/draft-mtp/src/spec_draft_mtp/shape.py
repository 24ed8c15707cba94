"""Define MtpShape: an MTP head's sizes and options, read from and written to config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from spec_kit.drafting import DecoderShape, decoder_fields, end_fields, head_fields, section

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core import TargetSpec
    from spec_core.records import TensorParallelHints
    from spec_kit.drafting import Json, Shapes

ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
"""Architectures of targets that ship this head; exports use the first name."""
COUNT = "mtp_num_hidden_layers"
SIZES = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
"""Sizes that engines take from the target's configuration."""
LAYER = "mtp.layers.0"
_PARTIAL = "partial_rotary_factor"


class MtpShape(DecoderShape):
    """The sizes of one MTP head."""

    @classmethod
    def for_target(cls, config: Any, target: TargetSpec, **own: object) -> Self:
        """Return a new head's shape.

        If the target rotates all channels, the shape says so explicitly, because Qwen3.5 rotates a quarter by
        default.
        """
        return super().for_target(config, target, **{"rope": {_PARTIAL: 1.0, **target.rope}, **own})

    @classmethod
    def from_json(cls, fields: Json, folder: Path) -> Self:
        """Return the shape of the head; a multimodal target's sizes are in the section ``text_config``."""
        return super().from_json({**fields, **section(fields, "text_config", folder)}, folder)

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return the rotary settings. If config.json does not say how many channels rotate, a quarter do."""
        read = super().read_own(fields, own, folder)
        return read | {"rope": {_PARTIAL: 0.25, **read["rope"]}}

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every tensor, under the target's names.

        ``q_proj`` computes a query and a gate for each head.
        """
        h, d = self.hidden_size, self.head_dim
        layer = self.layer_shapes(h) | {
            "self_attn.q_proj.weight": (2 * self.num_heads * d, h),
            "self_attn.q_norm.weight": (d,),
            "self_attn.k_norm.weight": (d,),
        }
        return {
            "mtp.fc.weight": (h, 2 * h),
            "mtp.pre_fc_norm_embedding.weight": (h,),
            "mtp.pre_fc_norm_hidden.weight": (h,),
            **{f"{LAYER}.{name}": shape for name, shape in layer.items()},
            "mtp.norm.weight": (h,),
        }

    def parallel_hints(self) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the layer.

        Every rank has all other modules undivided, and processes all tokens.
        """
        norms = tuple(f"{LAYER}.self_attn.{name}_norm" for name in "qk")
        return replace(self.layer_hints(LAYER), partial=norms, each_token=())

    def fixed_fields(self) -> Json:
        """Return fields of config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            COUNT: 1,
            "mtp_use_dedicated_embeddings": False,
            "attn_output_gate": True,
        }

    def to_json(self, target: TargetSpec) -> Json:
        """Return the config.json fields of a text-only Qwen3.5.

        vLLM derives the MTP head's configuration from these fields.
        """
        return {
            **head_fields(ARCHITECTURES[0], "qwen3_5_text", target),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": target.num_layers,
            **decoder_fields(self),
            "attn_output_gate": True,
            COUNT: 1,
            "mtp_use_dedicated_embeddings": False,
            "tie_word_embeddings": target.tied,
            **end_fields(self, target),
        }
