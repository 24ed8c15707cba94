"""Define Eagle3Shape: an Eagle3 draft's sizes and options, read from and written to config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from spec_draft_eagle3.config import MOST_LAYERS, ImageEmbeddings
from spec_kit.drafting import DecoderShape, Size, decoder_fields, end_fields, head_fields, read_layers

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core import TargetSpec
    from spec_kit.drafting import Json, Shapes

ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_ANGELSLIM_LAYERS = "aux_hidden_states_layer_ids"
"""Field of AngelSlim's config.json: layers whose outputs are captured. No engine reads it."""


class Eagle3Shape(DecoderShape):
    """The sizes of one Eagle3 draft."""

    nested: ClassVar[str] = "eagle_config"
    architecture: ClassVar[str] = ARCHITECTURE
    model_type: ClassVar[str] = "llama"
    attention: ClassVar[str] = "gqa"
    """Value of ``draft.attention``."""

    vocab_size: Size = Field(
        default_factory=lambda sizes: sizes["target_vocab_size"], alias="draft_vocab_size"
    )
    """Number of rows V' of the draft's head; equal to ``target_vocab_size`` if the vocabulary is not
    reduced."""
    num_layers: int = Field(1, ge=1, le=MOST_LAYERS, alias="num_hidden_layers")
    captured: tuple[int, ...] | None
    """Ids of the target layers whose input states are captured; None means the three default layers."""
    fc_norm: bool = False
    norm_output: bool = False
    images: ImageEmbeddings | None = Field(None, alias="image_embeddings")
    """Embeddings that the folder's draft was trained with at images; None if config.json does not say it."""

    @property
    def reduced(self) -> bool:
        """Whether the draft's vocabulary is smaller than the target's."""
        return self.vocab_size < self.target_vocab_size

    @property
    def later_layers(self) -> range:
        """Indices of the layers after the first."""
        return range(1, self.num_layers)

    @property
    def num_captured(self) -> int:
        """Number of captured layers that feed the draft."""
        return 3 if self.captured is None else len(self.captured)

    @property
    def norm_copies(self) -> dict[str, str]:
        """Map the name of each exported tensor that is a copy to the name of the original tensor.

        The input of a later layer goes through ``input_layernorm`` in vLLM and through ``hidden_norm`` in SGLang.
        Both engines accept a folder with both tensors (``llama_eagle3.py`` of each).
        """
        layers = [f"layers.{index}" for index in self.later_layers]
        return {f"{layer}.hidden_norm.weight": f"{layer}.input_layernorm.weight" for layer in layers}

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the ids of the captured layers: the residual streams that enter these layers of the target."""
        n = num_target_layers
        return (2, n // 2, n - 3) if self.captured is None else self.captured

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every trained tensor of the draft."""
        h = self.hidden_size
        layer = self.layer_shapes(2 * h) | {"hidden_norm.weight": (h,)}
        chunks = range(self.num_captured) if self.fc_norm else ()
        return {
            "fc.weight": (h, self.num_captured * h),
            **{f"midlayer.{name}": shape for name, shape in layer.items()},
            **{
                f"layers.{index}.{name}": shape
                for index in self.later_layers
                for name, shape in self.layer_shapes(h).items()
            },
            "norm.weight": (h,),
            "lm_head.weight": (self.vocab_size, h),
            **{f"fc_norm.{chunk}.weight": (h,) for chunk in chunks},
        }

    def mapping_shapes(self) -> tuple[Shapes, Shapes]:
        """Return the shapes of untrained tensors that a folder must have, and of all that it may have.

        The vocabulary mapping ``d2t`` is required if the vocabulary is reduced. A folder may have copies of
        norms.
        """
        mapping: Shapes = {"d2t": (self.vocab_size,), "t2d": (self.target_vocab_size,)}
        copies: Shapes = dict.fromkeys(self.norm_copies, (self.hidden_size,))
        return {"d2t": mapping["d2t"]} if self.reduced else {}, mapping | copies

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return the fields that only Eagle3 reads: the captured layers, as ``captured``.

        At the top level of config.json (``fields``), the number k means the input of layer k. In the nested
        section (``own``), k − 1 means the same state, as the output of layer k − 1.
        """
        outputs = (own, _LAYERS) if own.get(_LAYERS) else (fields, _ANGELSLIM_LAYERS)
        layers = read_layers((fields, _LAYERS), outputs, folder)
        return super().read_own(fields, own, folder) | {"captured": layers}

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            "norm_before_residual": False,
            "norm_before_fc": False,
            "bias": False,
            "use_aux_hidden_state": True,
            **({} if self.captured is None else {"num_aux_hidden_states": len(self.captured)}),
        }

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        if self.vocab_size > self.target_vocab_size:
            return f"a draft vocabulary of {self.vocab_size} exceeds the target's {self.target_vocab_size}"
        return super().problem()

    def to_json(self, target: TargetSpec) -> Json:
        """Return the fields of config.json that both engines read.

        ``draft_vocab_size`` is always written: SGLang needs it, and takes null as 'use the target's head'. If
        the vocabulary is not reduced, it equals the target's vocabulary size, and both engines take a row's
        index as its token id because d2t is absent. The captured layers are written in both conventions: vLLM
        reads the top-level list first (streams *entering* layer k), SGLang the nested list (*outputs* of
        layer k − 1).
        """
        layers = self.layer_ids(target.num_layers)
        return {
            **head_fields(self.architecture, self.model_type, target),
            "draft_vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            **decoder_fields(self),
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            **end_fields(self, target),
            "num_aux_hidden_states": len(layers),
            _LAYERS: list(layers),
            "eagle_config": {"use_aux_hidden_state": True, _LAYERS: [layer - 1 for layer in layers]},
        }
