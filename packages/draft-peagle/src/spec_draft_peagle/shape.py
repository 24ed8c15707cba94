"""Define PEagleShape: a P-EAGLE draft's sizes and options, read from and written to config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import Field, NonNegativeInt

from spec_core import TargetSpec
from spec_kit.block_drafting import MOST_LAYERS
from spec_kit.chain_drafting import ChainShape
from spec_kit.drafting import Json, Shapes, parallel_mask_token
from spec_kit.sharding import TensorParallelHints

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""Eagle3's architecture name. vLLM puts ``Eagle3`` before any other name, P-EAGLE's names included, and does
not know the names that result."""
MASK_TOKEN = "pard_token"
"""Field of config.json with the mask token, which Eagle3 drafts lack; see ``parallel_mask_token``."""


class PEagleShape(ChainShape):
    """The sizes of one P-EAGLE draft."""

    num_layers: int = Field(ge=1, le=MOST_LAYERS, alias="num_hidden_layers")
    mask_token_id: NonNegativeInt = Field(alias=MASK_TOKEN)

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every trained tensor of the draft."""
        h = self.hidden_size
        shapes: Shapes = {
            "mask_hidden": (1, 1, self.num_captured * h),
            **self.input_and_head_shapes(),
            "layers.0.hidden_norm.weight": (h,),
        }
        for index in range(self.num_layers):
            layer = self.layer_shapes(h if index else 2 * h)
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes

    def parallel_hints(self) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the layers, the head, and ``fc`` along its inputs.

        Tokens are not divided: the number of rows and mask tokens need not be a multiple of the number of
        ranks.
        """
        layers = (self.layer_hints(f"layers.{index}") for index in range(self.num_layers))
        hints = sum(layers, self.input_and_head_hints())
        return replace(hints, enters=("layers.0.normed_state", *hints.enters), each_token=())

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return the captured layers, and the mask token from the first present of vLLM's fields for it."""
        return super().read_own(fields, own, folder) | {MASK_TOKEN: parallel_mask_token(fields)}

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {"fc_norm": False, "norm_output": False}

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        if self.mask_token_id >= self.target_vocab_size:
            return (
                f"mask_token_id={self.mask_token_id} is not below the vocabulary's {self.target_vocab_size}"
            )
        if self.sliding_window is not None:
            return f"sliding_window={self.sliding_window}: P-EAGLE is trained with full attention only"
        return super().problem()

    def to_json(self, target: TargetSpec) -> Json:
        """Return the config.json fields that vLLM reads: fields of an Eagle3 draft, and the mask token."""
        fields = self.chain_fields(ARCHITECTURE, "llama", target, num_layers=self.num_layers, norms={})
        return {**fields, MASK_TOKEN: self.mask_token_id}
