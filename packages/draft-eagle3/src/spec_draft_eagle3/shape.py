"""Define Eagle3Shape: an Eagle3 draft's sizes and options, read from and written to config.json."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from spec_core import TargetSpec
from spec_draft_eagle3.config import MOST_LAYERS, ImageEmbeddings
from spec_kit.chain_drafting import ChainShape
from spec_kit.drafting import Json, Shapes, architectures
from spec_kit.sharding import TensorParallelHints

ARCHITECTURE = "LlamaForCausalLMEagle3"
QWEN3_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
"""Name of a draft whose layers are Qwen3's, with norms of queries and keys; only vLLM knows it."""


class Eagle3Shape(ChainShape):
    """The sizes of one Eagle3 draft."""

    architecture: ClassVar[str] = ARCHITECTURE
    model_type: ClassVar[str] = "llama"
    attention: ClassVar[str] = "gqa"
    """Value of ``draft.attention``."""

    num_layers: int = Field(1, ge=1, le=MOST_LAYERS, alias="num_hidden_layers")
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normed. In config.json, the architecture's name says it."""
    images: ImageEmbeddings | None = Field(None, alias="image_embeddings")
    """Embeddings that the folder's draft was trained with at images; None if config.json does not say it."""

    @property
    def later_layers(self) -> range:
        """Indices of the layers after the first."""
        return range(1, self.num_layers)

    @property
    def norm_copies(self) -> dict[str, str]:
        """Map the name of each exported tensor that is a copy to the name of the original tensor.

        The input of a later layer goes through ``input_layernorm`` in vLLM and through ``hidden_norm`` in SGLang.
        Both engines accept a folder with both tensors (``llama_eagle3.py`` of each).
        """
        layers = [f"layers.{index}" for index in self.later_layers]
        return {f"{layer}.hidden_norm.weight": f"{layer}.input_layernorm.weight" for layer in layers}

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every trained tensor of the draft."""
        h = self.hidden_size
        layer = self.layer_shapes(2 * h) | {"hidden_norm.weight": (h,)}
        chunks = range(self.num_captured) if self.fc_norm else ()
        return {
            **self.input_and_head_shapes(),
            **{f"midlayer.{name}": shape for name, shape in layer.items()},
            **{
                f"layers.{index}.{name}": shape
                for index in self.later_layers
                for name, shape in self.layer_shapes(h).items()
            },
            **{f"fc_norm.{chunk}.weight": (h,) for chunk in chunks},
        }

    def attention_shapes(self, inputs: int) -> Shapes:
        """Return name and shape of each tensor of the attention. ``inputs``: its input channels."""
        norms = {f"{kind}_norm.weight": (self.head_dim,) for kind in "qk" if self.qk_norm}
        return super().attention_shapes(inputs) | norms

    def attention_hints(self, attention: str) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the attention at the module path ``attention``."""
        norms = tuple(f"{attention}.{kind}_norm" for kind in "qk" if self.qk_norm)
        return super().attention_hints(attention) + TensorParallelHints(partial=norms)

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return what every chain reads, and whether queries and keys are normed."""
        is_normed = QWEN3_ARCHITECTURE in architectures(fields)
        return super().read_own(fields, own, folder) | {"qk_norm": is_normed}

    def mapping_shapes(self) -> tuple[Shapes, Shapes]:
        """Return the shapes of untrained tensors that a folder must have, and of all that it may have.

        A folder may have copies of norms beside the vocabulary mapping.
        """
        required, mapping = super().mapping_shapes()
        return required, mapping | dict.fromkeys(self.norm_copies, (self.hidden_size,))

    def to_json(self, target: TargetSpec) -> Json:
        """Return the fields of config.json that both engines read."""
        norms: Json = {"fc_norm": self.fc_norm, "norm_output": self.norm_output}
        named = (QWEN3_ARCHITECTURE, "qwen3") if self.qk_norm else (self.architecture, self.model_type)
        return self.chain_fields(*named, target, num_layers=self.num_layers, norms=norms)
