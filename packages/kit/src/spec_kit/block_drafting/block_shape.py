"""Define options, sizes and config.json of drafts that guess blocks; importing this imports no torch."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, get_args

import pydantic
from pydantic import Field, NonNegativeInt

from spec_core import TargetSpec
from spec_kit.drafting import (
    DecoderConfig,
    Json,
    Shapes,
    Size,
    checked,
    decoder_fields,
    end_fields,
    head_fields,
)
from spec_kit.drafting.decoder_shape import CapturedLayers
from spec_kit.drafting.draft_shape import layer_range_problem, read_layers
from spec_kit.drafting.vocabulary_shape import VocabularyShape
from spec_kit.sharding import TensorParallelHints

MOST_LAYERS = 1024
"""Largest number of layers of a draft; published drafts have one to eight."""
LayerType = Literal["full_attention", "sliding_attention"]
"""Kind of attention of a layer, as in config.json."""
FULL, SLIDING = get_args(LayerType)
_Depth = Annotated[int, Field(ge=1, le=MOST_LAYERS)]


class BlockConfig(DecoderConfig):
    """Options of a draft that guesses blocks.

    An option that is None takes its value from the draft in the folder ``init_from``. Without a folder it takes the
    default named below. A run whose options contradict the folder is refused.
    """

    speed_only: ClassVar[frozenset[str]] = frozenset({"checkpoint_activations"})

    num_anchors: int = Field(512, ge=1, le=1 << 20)
    """Most blocks that one document trains in one epoch, at positions drawn anew each epoch."""
    anchor_share: float = Field(0.375, gt=0, le=1)
    """Largest share of a document's possible blocks that it trains in one epoch. More of them overlap: they cost time
    and teach little."""
    checkpoint_activations: bool = False
    """Whether to compute each layer again in the backward pass instead of storing its activations. This needs less
    memory and one more forward pass of the layers; results stay the same."""
    opd: bool = Field(False, exclude_if=lambda switch: not switch)
    """Draft-OPD (arXiv 2605.29343), with ``decode.on_policy``: a refused guess has the loss KL(draft ‖ target),
    weighted by its place; an accepted one has the ordinary loss. Both kinds weigh one half."""
    num_layers: int | None = Field(None, ge=1, le=MOST_LAYERS)
    """Decoder layers of the draft; the default is 5."""
    mask_token_id: int | None = Field(None, ge=0)
    """Id of the token whose embedding fills the slots to be guessed. The default is a token that the tokenizer leaves
    unused or reserves, else the vocabulary's last token that is no end token."""

    sliding_window: int | None = Field(None, ge=2)
    """Number of positions to which a sliding layer's query attends, its own position included; at least
    ``block_size``. Without it, all layers have full attention."""
    num_features: int | None = Field(None, ge=1, le=MOST_LAYERS)
    """Number of the target's residual streams that feed the draft, spread evenly from early to late layers. The
    default is the length of ``layers`` if it is set, else 5."""
    layers: CapturedLayers | None = Field(None, min_length=1)
    """Ids of the target's residual streams that feed the draft; id k is the input of target layer k. The
    default is 1 + round(1 + i · (N − 4) / (num_features − 1)) for i = 0, 1, …, with N layers of the target."""

    def num_blocks(self, num_possible: int) -> int:
        """Return how many blocks a document trains of those that it could."""
        return min(self.num_anchors, ceil(self.anchor_share * num_possible))

    @pydantic.model_validator(mode="after")
    def _features_agree(self) -> Self:
        if self.num_features and self.layers and self.num_features != len(self.layers):
            raise ValueError(f"num_features={self.num_features} and layers={list(self.layers)} disagree")
        return self


class BlockShape(VocabularyShape):
    """The sizes of one draft that guesses blocks."""

    nested: ClassVar[str] = "dflash_config"

    max_positions: Size = Field(32768, alias="max_position_embeddings")
    layer_types: tuple[LayerType, ...]
    sliding_window: Size | None = None
    """Number of positions to which a sliding layer's query attends, its own position included; None without
    sliding layers."""
    causal: bool | None = None
    """Whether attention inside a block is causal in every layer. None means that it is causal in sliding layers
    and not in full ones."""
    block_size: Size = 16
    """Number of slots of a block; the first holds the last known token."""
    mask_token_id: NonNegativeInt
    layers: tuple[int, ...]
    """Captured residual streams: id k is the input of target layer k."""
    num_target_layers: Size | None = None
    """Number of layers of the target; None if a published draft does not say it."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the draft."""
        return len(self.layer_types)

    @property
    def num_features(self) -> int:
        """Number of captured residual streams."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer, in positions; None means full attention."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def causality(self) -> tuple[bool, ...]:
        """Whether attention inside a block is causal, for each layer."""
        return tuple(kind == SLIDING if self.causal is None else self.causal for kind in self.layer_types)

    @property
    def is_causal(self) -> bool | None:
        """The same for all layers; None if the layers differ."""
        values = set(self.causality)
        return values.pop() if len(values) == 1 else None

    def tensor_shapes(self) -> Shapes:
        """Return the shape of every trained tensor of the backbone by name."""
        h = self.hidden_size
        head_norms = {f"self_attn.{kind}_norm.weight": (self.head_dim,) for kind in "qk"}
        layer = self.layer_shapes(h) | head_norms
        shapes: Shapes = {"fc.weight": (h, self.num_features * h), "hidden_norm.weight": (h,)}
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes | {"norm.weight": (h,)}

    def parallel_hints(self) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the backbone."""
        layers = self.layer_names
        own = TensorParallelHints(
            rows={"fc": self.num_features * self.hidden_size},
            whole_inputs=("fc",),
            enters=("hidden_norm",),
            leaves=("fc",),
            each_token=("hidden_norm", "norm"),
            all_tokens_in={layers[0]: self.block_size},
            all_tokens_out=("norm",),
            partial=tuple(f"{layer}.self_attn.{kind}_norm" for layer in layers for kind in "qk"),
        )
        return sum(map(self.layer_hints, layers), own + self.vocabulary_hints())

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the decoder layers in the module."""
        return tuple(f"layers.{index}" for index in range(self.num_layers))

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return the fields that published drafts store under several keys or in several forms.

        A field of the nested object ``own`` takes precedence.
        """
        both = fields | own
        depth = checked(_Depth, both.get("num_hidden_layers"), folder, "num_hidden_layers")
        types = checked(
            tuple[LayerType, ...], both.get("layer_types") or [FULL] * depth, folder, "layer_types"
        )
        # Base configurations have a window that no layer uses.
        window = both.get("swa_window_size", both.get("sliding_window")) if SLIDING in types else None
        causal = fields.get("is_causal", own.get("causal"))
        if all((kind == SLIDING) is causal for kind in types):
            causal = None
        layers = read_layers((both, "eagle_aux_hidden_state_layer_ids"), (both, "target_layer_ids"), folder)
        if layers is None:  # as SGLang does: the default for as many features as layers
            key = "num_target_layers"
            layers = default_layers(checked(Size, both.get(key), folder, key), depth)
        attention = {"layer_types": types, "sliding_window": window, "causal": causal}
        return {**own, **super().read_own(fields, own, folder), **attention, "layers": layers}

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            "use_aux_hidden_state": True,
            "use_swa": False,
            "use_gemma_norm": False,
            "is_neox_style": True,
            "rope_is_neox_style": True,
            "attention_sink_bias": False,
            "add_swa_attention_sink_bias": False,
            "attention_value_scale": None,
            "output_multiplier": 1.0,
            "final_logit_softcapping": None,
            "num_hidden_layers": self.num_layers,
            "is_causal": self.is_causal,
            "causal": self.is_causal,
        }

    def problem(self) -> str | None:
        """Return why no block draft can have this shape, or None."""
        if self.mask_token_id >= self.target_vocab_size:
            return (
                f"mask_token_id={self.mask_token_id} is not below the vocabulary's {self.target_vocab_size}"
            )
        window = self.sliding_window
        if SLIDING in self.layer_types and (window is None or window < self.block_size):
            return (
                f"sliding layers with sliding_window={window}: at least a block, {self.block_size}, is needed"
            )
        return super().problem()

    def layer_problem(self, target: TargetSpec) -> str | None:
        """Return what is wrong with the captured layers, or None."""
        if self.num_target_layers not in (None, target.num_layers):
            return f"it was made for number of layers {self.num_target_layers}, this target has {target.num_layers}"
        if list(self.layers) != sorted(set(self.layers)):
            return (
                f"its {target.num_layers} layers are too few for {len(self.layers)} different features (8 layers for "
                "5); lower draft.num_features or set draft.layers"
            )
        return layer_range_problem(self.layers, target)

    def backbone_fields(self, architecture: str, target: TargetSpec, *, tied: bool) -> Json:
        """Return the fields of a Qwen3-style draft's config.json that vLLM and SGLang both read.

        ``tied``: whether the target's head and embedding share their weights. A reduced vocabulary has a head of
        its own, and ``draft_vocab_size`` is its number of rows.

        vLLM 0.32 and SGLang 0.5.23 read ``is_causal`` first, for all layers at once. vLLM 0.26 and SGLang
        0.5.16 do not know this field. Without it, all versions take sliding layers as causal and full layers
        as not causal. Transformers drops a ``sliding_window`` that is not declared as used.
        """
        return {
            **head_fields(architecture, "qwen3", target),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            **decoder_fields(self),
            "tie_word_embeddings": tied and not self.reduced,
            **({"draft_vocab_size": self.vocab_size} if self.reduced else {}),
            "num_target_layers": target.num_layers,
            **end_fields(self, target),
            "layer_types": list(self.layer_types),
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_layers,
            **({} if self.is_causal is None else {"is_causal": self.is_causal}),
        }

    @property
    def nested_fields(self) -> Json:
        """Fields of the nested object that drafts of all kinds have. vLLM 0.26 reads causality here alone."""
        return {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": self.output_ids,
            **({} if self.causal is None else {"causal": self.causal}),
        }

    @property
    def output_ids(self) -> list[int]:
        """The captured layers as ``target_layer_ids`` counts them: id k is the output of target layer k."""
        return [layer - 1 for layer in self.layers]


def default_layers(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Return the captured layers that the DFlash paper chooses.

    They lie evenly between the output of the second layer and the output of the fourth-last layer.
    """
    n = num_target_layers
    if num_features == 1:
        return (n // 2 + 1,)
    # The output's number is rounded as in SGLang: a half is rounded to the even number.
    return tuple(1 + round(1 + i * (n - 4) / (num_features - 1)) for i in range(num_features))
