"""DFlashShape: what fixes a DFlash draft's tensors and arithmetic, and its form as a served config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, get_args

from pydantic import Field, NonNegativeInt

from spec_draft_dflash.config import MOST_LAYERS, LayerType
from spec_kit.drafting import (
    DecoderShape,
    Size,
    checked,
    decoder_fields,
    end_fields,
    head_fields,
    layer_range_problem,
    read_layers,
)

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core import TargetSpec
    from spec_kit.drafting import Json, Shapes

ARCHITECTURE = "DFlashDraftModel"
FULL, SLIDING = get_args(LayerType)
_Depth = Annotated[int, Field(ge=1, le=MOST_LAYERS)]


class DFlashShape(DecoderShape):
    """The sizes of one DFlash draft."""

    nested: ClassVar[str] = "dflash_config"

    max_positions: Size = Field(32768, alias="max_position_embeddings")
    layer_types: tuple[LayerType, ...]
    sliding_window: Size | None = None
    """Positions that a sliding layer sees, the query's own included; None without such layers."""
    block_size: Size = 16
    mask_token_id: NonNegativeInt
    layers: tuple[int, ...]
    """Captured residual streams: those entering these layers of the target."""
    num_target_layers: Size | None = None
    """Layers of the target; None where a published draft leaves them out."""

    @property
    def num_layers(self) -> int:
        """Decoder layers of the draft."""
        return len(self.layer_types)

    @property
    def num_features(self) -> int:
        """Captured residual streams."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer; None: full attention."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def is_causal(self) -> bool | None:
        """Whether blocks are causal inside; None where layers differ."""
        kinds = set(self.layer_types)
        return None if len(kinds) > 1 else kinds == {SLIDING}

    def tensor_shapes(self) -> Shapes:
        """Return every trained tensor of the draft."""
        h = self.hidden_size
        head_norms = {f"self_attn.{kind}_norm.weight": (self.head_dim,) for kind in "qk"}
        layer = self.layer_shapes(h) | head_norms
        shapes: Shapes = {"fc.weight": (h, self.num_features * h), "hidden_norm.weight": (h,)}
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes | {"norm.weight": (h,)}

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return what has several places or forms in published drafts; the nested object comes first."""
        both = fields | own
        depth = checked(_Depth, both.get("num_hidden_layers"), folder, "num_hidden_layers")
        types = both.get("layer_types") or [FULL] * depth
        types = checked(tuple[LayerType, ...], types, folder, "layer_types")
        # Base configurations carry a window that nobody uses.
        window = both.get("swa_window_size", both.get("sliding_window")) if SLIDING in types else None
        layers = read_layers((both, "eagle_aux_hidden_state_layer_ids"), (both, "target_layer_ids"), folder)
        if layers is None:  # as SGLang does: the default for as many features as layers
            key = "num_target_layers"
            layers = default_layers(checked(Size, both.get(key), folder, key), depth)
        found = {**own, "layer_types": types, "sliding_window": window, "layers": layers}
        return super().read_own(fields, own, folder) | found

    def fixed_fields(self) -> Json:
        """Return fields of published drafts that have one value here."""
        return super().fixed_fields() | {
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
            "num_hidden_layers": self.num_layers,
            "draft_vocab_size": self.target_vocab_size,
            # Full layers look both ways inside a block, sliding ones do not.
            "is_causal": self.is_causal,
            "causal": self.is_causal,
        }

    def problem(self) -> str | None:
        """Return why no block draft can have this shape, or None."""
        window = self.sliding_window
        if SLIDING in self.layer_types and (window is None or window < self.block_size):
            return (
                f"sliding layers with sliding_window={window}: at least a block, {self.block_size}, is needed"
            )
        if self.block_size < 2:
            return f"block_size={self.block_size} leaves no slot to guess"
        if self.mask_token_id >= self.target_vocab_size:
            return (
                f"mask_token_id={self.mask_token_id} is not below the vocabulary's {self.target_vocab_size}"
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

    def to_json(self, target: TargetSpec) -> Json:
        """Return fields that both engines read.

        vLLM 0.32 and SGLang 0.5.23 read ``is_causal`` first, for all layers at once. vLLM 0.26 and SGLang 0.5.16 do
        not know it; without it, all take sliding layers as causal and full ones as not. transformers drops a
        ``sliding_window`` that is not declared as used. The captured layers come in both conventions:
        ``target_layer_ids`` counts outputs of layers; vLLM's top-level list, which it reads first, counts streams
        entering them.
        """
        causal = self.is_causal
        return {
            **head_fields(ARCHITECTURE, "qwen3", target),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            **decoder_fields(self),
            "tie_word_embeddings": target.tied,
            "num_target_layers": target.num_layers,
            **end_fields(self, target),
            "layer_types": list(self.layer_types),
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_layers,
            **({} if causal is None else {"is_causal": causal}),
            "block_size": self.block_size,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": [layer - 1 for layer in self.layers],
            },
        }


def default_layers(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Return the DFlash paper's choice, evenly from the second layer's output to that of the fourth last."""
    n = num_target_layers
    if num_features == 1:
        return (n // 2 + 1,)
    # The output's number is rounded, as SGLang does it: a half goes to the even one.
    return tuple(1 + round(1 + i * (n - 4) / (num_features - 1)) for i in range(num_features))
