"""Define MtpShape: an MTP head's sizes and options, read from and written to config.json.

``expert_shapes.py`` has the shapes of heads with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from spec_core import TargetSpec
from spec_kit.drafting import DecoderShape, Json, Shapes, decoder_fields, end_fields, head_fields, section
from spec_kit.sharding import TensorParallelHints

SIZES = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
"""Sizes that engines take from the target's configuration."""
LAYER = "mtp.layers.0"
_PARTIAL = "partial_rotary_factor"


class MtpShape(DecoderShape):
    """The sizes of one MTP head. This class is for dense Qwen3.5, and the base of the other heads' shapes.

    The class variables describe the head: they choose the modules of its layer (``layer.py``), and how the
    target's files store it.
    """

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    """Architectures of targets that ship this head; exports use the first name."""
    model_type: ClassVar[str] = "qwen3_5_text"
    count: ClassVar[str] = "mtp_num_hidden_layers"
    """Field of config.json with the number of MTP layers."""
    fixed: ClassVar[Mapping[str, object]] = {"attn_output_gate": True, "mtp_use_dedicated_embeddings": False}
    """Fields of config.json for which this kind of head supports only the given value; exports have them, too."""
    attention: ClassVar[str] = "gated"
    feed_forward: ClassVar[str] = "dense"
    stored_as_layer: ClassVar[bool] = False
    """Whether the target's files store the head as one more decoder layer (DeepSeek V3, GLM). Norms of such a
    head store their weight itself, other norms store their weight minus 1."""
    rotated: ClassVar[float] = 0.25
    """Share of a head's channels that rotate if config.json does not say it."""

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
        """Return the rotary settings, with the share of rotated channels."""
        read = super().read_own(fields, own, folder)
        return read | {"rope": {_PARTIAL: cls.rotated, **read["rope"]}}

    @property
    def expert_weights(self) -> int:
        """Number of the experts' weights that one token is multiplied by."""
        return 0

    def attention_shapes(self, inputs: int) -> Shapes:
        """Return name and shape of each tensor of the attention; ``inputs``: its input channels.

        ``q_proj`` computes a query and a gate for each head.
        """
        d = self.head_dim
        own = {
            "q_proj.weight": (2 * self.num_heads * d, inputs),
            "q_norm.weight": (d,),
            "k_norm.weight": (d,),
        }
        return super().attention_shapes(inputs) | own

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every trained tensor, under Qwen3.5's names."""
        h = self.hidden_size
        return {
            "mtp.fc.weight": (h, 2 * h),
            "mtp.pre_fc_norm_embedding.weight": (h,),
            "mtp.pre_fc_norm_hidden.weight": (h,),
            **{f"{LAYER}.{name}": shape for name, shape in self.layer_shapes(h).items()},
            "mtp.norm.weight": (h,),
        }

    def parallel_hints(self) -> TensorParallelHints | None:
        """Return how tensor-parallel ranks divide the layer, or None if they cannot divide it.

        Every rank has all other modules undivided, and processes all tokens.
        """
        norms = tuple(f"{LAYER}.self_attn.{name}_norm" for name in "qk")
        return replace(self.layer_hints(LAYER), partial=norms, each_token=())

    def fixed_fields(self) -> Json:
        """Return fields of config.json for which only the given value is supported."""
        return super().fixed_fields() | {self.count: 1, **self.fixed}

    def engine_problem(self, target: TargetSpec) -> str | None:
        """Return in which size the head differs from the head that engines build beside the target, or None.

        Engines build the head with the target's sizes, and vLLM 0.32 loads the first rows of a larger matrix
        without a warning.
        """
        for name in SIZES:
            size, expected = getattr(self, name), getattr(target, name)
            if size != expected:
                return f"{name}={size}, and engines build such a head with the target's, {expected}"
        return None

    def layer_fields(self, target: TargetSpec) -> Json:
        """Return the fields of config.json that only this kind of layer has."""
        return {"intermediate_size": self.intermediate_size}

    def to_json(self, target: TargetSpec) -> Json:
        """Return the config.json fields of a text-only target.

        vLLM derives the MTP head's configuration from these fields.
        """
        return {
            **head_fields(self.architectures[0], self.model_type, target),
            "hidden_size": self.hidden_size,
            "num_hidden_layers": target.num_layers,
            **decoder_fields(self),
            **self.layer_fields(target),
            **self.fixed,
            self.count: 1,
            "tie_word_embeddings": target.tied,
            **end_fields(self, target),
        }
