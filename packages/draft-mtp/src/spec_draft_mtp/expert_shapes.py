"""Define the shapes of MTP heads with experts: Qwen3.5 MoE, DeepSeek V3, GLM-4.5 and GLM-4.7-Flash.

``KINDS`` lists every kind of head. A kind combines an attention with a feed-forward network.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from spec_core import TargetSpec
from spec_draft_mtp.shape import LAYER, MtpShape
from spec_kit.drafting import DecoderShape, Json, LatentShape, Shapes, Size, architectures, read_config
from spec_kit.sharding import TensorParallelHints

BIAS = "mlp.gate.e_score_correction_bias"
"""Name in the layer of the constant that is added to the experts' scores before the best are chosen."""


class ExpertShape(MtpShape):
    """The sizes of a head whose feed-forward network has experts, a router and an expert that is always used."""

    shared: ClassVar[str]
    """Name of the expert that is always used."""

    intermediate_size: Size = Field(alias="moe_intermediate_size")
    """Width of one expert."""
    num_experts: Size
    experts_per_token: Size = Field(alias="num_experts_per_tok")

    @property
    @abstractmethod
    def shared_width(self) -> int:
        """Width of the expert that is always used."""

    @property
    def expert_weights(self) -> int:
        """Number of the experts' weights that one token is multiplied by."""
        return 3 * self.experts_per_token * self.intermediate_size * self.hidden_size

    @property
    def inner_values(self) -> int:
        """Least number of values inside a layer that the backward pass needs for each row."""
        wide = self.experts_per_token * self.intermediate_size + self.shared_width
        return 2 * self.num_heads * self.head_dim + 3 * wide

    def layer_shapes(self, inputs: int) -> Shapes:
        """Return name and shape of each trained tensor of the layer; ``inputs``: channels of its input."""
        others = super().layer_shapes(inputs)
        own = {name: shape for name, shape in others.items() if not name.startswith("mlp.")}
        return own | {f"mlp.{name}": shape for name, shape in self.expert_shapes().items()}

    def expert_shapes(self) -> Shapes:
        """Return name and shape of each tensor of the feed-forward network; experts are stacked."""
        h, inner, experts, wide = (
            self.hidden_size,
            self.intermediate_size,
            self.num_experts,
            self.shared_width,
        )
        return {
            "gate.weight": (experts, h),
            "experts.gate_up_proj": (experts, 2 * inner, h),
            "experts.down_proj": (experts, h, inner),
            f"{self.shared}.gate_proj.weight": (wide, h),
            f"{self.shared}.up_proj.weight": (wide, h),
            f"{self.shared}.down_proj.weight": (h, wide),
        }

    def parallel_hints(self) -> TensorParallelHints | None:
        """Return None: experts are not divided."""
        return None

    def problem(self) -> str | None:
        """Return why no layer can have this shape, or None."""
        if self.experts_per_token > self.num_experts:
            return f"{self.experts_per_token} experts for each token, of {self.num_experts}"
        return super().problem()

    def engine_problem(self, target: TargetSpec) -> str | None:
        """Return in which value the head differs from the head that engines build beside the target, or None.

        Engines build the head from the target's config.json. They also rotate with the target's values.
        """
        own = shape_of(target)
        if not isinstance(own, ExpertShape) or type(own) is not type(self):
            return f"engines serve such a head only for {' or '.join(self.architectures)}"
        expected = own.all_values()
        for name, value in self.all_values().items():
            if value != expected[name]:
                return f"{name}={value}, and engines build such a head with the target's, {expected[name]}"
        return None

    def all_values(self) -> Json:
        """Return each size and each rotary value by its name."""
        sizes = {name: getattr(self, name) for name in type(self).model_fields if name != "rope"}
        return sizes | self.rotary_values

    def layer_fields(self, target: TargetSpec) -> Json:
        """Return the fields of config.json that only this kind of layer has."""
        added = (type(self).model_fields.keys() - DecoderShape.model_fields.keys()) | {"intermediate_size"}
        named = {name: info.alias or name for name, info in type(self).model_fields.items() if name in added}
        own = {key: getattr(self, name) for name, key in named.items()}
        return {"intermediate_size": target.intermediate_size, **own}


class QwenExpertShape(ExpertShape):
    """The sizes of Qwen3.5 MoE's head. The router's scores are a softmax over the experts."""

    architectures: ClassVar[tuple[str, ...]] = (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    )
    model_type: ClassVar[str] = "qwen3_5_moe_text"
    feed_forward: ClassVar[str] = "softmax"
    shared: ClassVar[str] = "shared_expert"

    shared_expert_intermediate_size: Size

    @property
    def shared_width(self) -> int:
        """Width of the expert that is always used."""
        return self.shared_expert_intermediate_size

    def expert_shapes(self) -> Shapes:
        """Return name and shape of each tensor of the feed-forward network."""
        return super().expert_shapes() | {f"{self.shared}_gate.weight": (1, self.hidden_size)}


class LayerShape(ExpertShape):
    """The sizes of a head that the target's files store as one more layer.

    The router's scores are sigmoids. It chooses groups of experts first, and then experts of these groups.
    """

    count: ClassVar[str] = "num_nextn_predict_layers"
    fixed: ClassVar[Mapping[str, object]] = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
    }
    feed_forward: ClassVar[str] = "sigmoid"
    stored_as_layer: ClassVar[bool] = True
    rotated: ClassVar[float] = 1.0
    shared: ClassVar[str] = "shared_experts"

    num_experts: Size = Field(alias="n_routed_experts")
    num_shared: Size = Field(alias="n_shared_experts")
    num_groups: Size = Field(alias="n_group")
    groups_per_token: Size = Field(alias="topk_group")
    routed_scale: float = Field(gt=0, alias="routed_scaling_factor")

    @property
    def shared_width(self) -> int:
        """Width of the expert that is always used."""
        return self.num_shared * self.intermediate_size

    def mapping_shapes(self) -> tuple[Shapes, Shapes]:
        """Return the shape of the constant in the experts' choice, which training leaves as it is."""
        return {f"{LAYER}.{BIAS}": (self.num_experts,)}, {}

    def problem(self) -> str | None:
        """Return why no layer can have this shape, or None."""
        size, rest = divmod(self.num_experts, self.num_groups)
        if rest or size < 2:
            return f"{self.num_experts} experts in {self.num_groups} groups: expected groups of at least two"
        if self.groups_per_token > self.num_groups or self.experts_per_token > self.groups_per_token * size:
            return (
                f"{self.experts_per_token} experts for each token from {self.groups_per_token} of {self.num_groups} "
                f"groups of {size}"
            )
        return super().problem()

    def layer_fields(self, target: TargetSpec) -> Json:
        """Return the fields of config.json that only this kind of layer has; only layer 0 is called dense."""
        return super().layer_fields(target) | {"first_k_dense_replace": 1}


class GlmShape(LayerShape):
    """The sizes of the head of GLM-4.5 and GLM-4.6."""

    architectures: ClassVar[tuple[str, ...]] = ("Glm4MoeForCausalLM",)
    model_type: ClassVar[str] = "glm4_moe"
    attention: ClassVar[str] = "grouped"
    rotated: ClassVar[float] = 0.5

    attention_bias: bool = False
    head_norms: bool = Field(default=False, alias="use_qk_norm")

    def attention_shapes(self, inputs: int) -> Shapes:
        """Return name and shape of each tensor of the attention; ``inputs``: its input channels."""
        shapes = DecoderShape.attention_shapes(self, inputs)
        biases = {f"{name}_proj.bias": shapes[f"{name}_proj.weight"][:1] for name in "qkv"}
        norms = {f"{name}_norm.weight": (self.head_dim,) for name in "qk"}
        return shapes | (biases if self.attention_bias else {}) | (norms if self.head_norms else {})

    def fixed_fields(self) -> Json:
        """Return fields of config.json for which only the given value is supported."""
        return {key: value for key, value in super().fixed_fields().items() if key != "attention_bias"}


class DeepseekShape(LatentShape, LayerShape):
    """The sizes of DeepSeek V3's head."""

    architectures: ClassVar[tuple[str, ...]] = ("DeepseekV3ForCausalLM",)
    model_type: ClassVar[str] = "deepseek_v3"
    attention: ClassVar[str] = "latent"

    intermediate_size: Size = Field(alias="moe_intermediate_size")
    """Width of one expert; ``LatentShape`` has the field under its usual key."""

    def to_json(self, target: TargetSpec) -> Json:
        """Return the config.json fields of a target of this kind; it has no ``head_dim``."""
        fields = super().to_json(target)
        del fields["head_dim"]
        return fields


class GlmLiteShape(DeepseekShape):
    """The sizes of GLM-4.7-Flash's head."""

    architectures: ClassVar[tuple[str, ...]] = ("Glm4MoeLiteForCausalLM",)
    model_type: ClassVar[str] = "glm4_moe_lite"


KINDS: tuple[type[MtpShape], ...] = (MtpShape, QwenExpertShape, DeepseekShape, GlmShape, GlmLiteShape)


def head_kind(fields: Json) -> type[MtpShape] | None:
    """Return the kind of head that a target's or an export's config.json describes; None if it has no head.

    Kimi K2 has DeepSeek V3's architecture, and its config.json counts no MTP layers.
    """
    nested = fields.get("text_config")
    sizes = {**fields, **nested} if isinstance(nested, dict) else fields
    for kind in KINDS:
        is_named = not architectures(fields).isdisjoint(kind.architectures)
        if is_named and sizes.get(kind.count) not in (None, 0):
            return kind
    return None


def shape_of(target: TargetSpec) -> MtpShape | None:
    """Return the shape of the head with experts that the target's config.json describes; None for any other."""
    fields = read_config(target.folder)
    kind = None if fields is None else head_kind(fields)
    if fields is None or kind is None or not issubclass(kind, ExpertShape):
        return None
    return kind.from_json(fields, target.folder)
