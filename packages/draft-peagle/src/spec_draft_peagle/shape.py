"""Define PEagleShape: a P-EAGLE draft's sizes and options, read from and written to config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, NonNegativeInt

from spec_core.records import TensorParallelHints
from spec_kit.drafting import (
    DecoderShape,
    Size,
    decoder_fields,
    end_fields,
    head_fields,
    parallel_mask_token,
    read_layers,
)

if TYPE_CHECKING:
    from pathlib import Path

    from spec_core import TargetSpec
    from spec_kit.drafting import Json, Shapes

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""Eagle3's architecture name. vLLM puts ``Eagle3`` before any other name, P-EAGLE's names included, and does
not know the names that result."""
MASK_TOKEN = "pard_token"
"""Field of config.json with the mask token, which Eagle3 drafts lack; see ``parallel_mask_token``."""
_LAYERS = "eagle_aux_hidden_state_layer_ids"


class PEagleShape(DecoderShape):
    """The sizes of one P-EAGLE draft."""

    nested: ClassVar[str] = "eagle_config"

    num_layers: Size = Field(alias="num_hidden_layers")
    vocab_size: Size = Field(
        default_factory=lambda sizes: sizes["target_vocab_size"], alias="draft_vocab_size"
    )
    """Number of rows V' of the draft's head; equal to ``target_vocab_size`` if the vocabulary is not
    reduced."""
    mask_token_id: NonNegativeInt = Field(alias=MASK_TOKEN)
    captured: tuple[int, ...] | None
    """Ids of the target layers whose input states are captured; None means the three default layers."""

    @property
    def reduced(self) -> bool:
        """Whether the draft's vocabulary is smaller than the target's."""
        return self.vocab_size < self.target_vocab_size

    @property
    def num_captured(self) -> int:
        """Number of captured layers that feed the draft."""
        return 3 if self.captured is None else len(self.captured)

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the ids of the captured layers: the residual streams that enter these layers of the target."""
        n = num_target_layers
        return (2, n // 2, n - 3) if self.captured is None else self.captured

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every trained tensor of the draft."""
        h = self.hidden_size
        shapes: Shapes = {
            "mask_hidden": (1, 1, self.num_captured * h),
            "fc.weight": (h, self.num_captured * h),
            "layers.0.hidden_norm.weight": (h,),
        }
        for index in range(self.num_layers):
            layer = self.layer_shapes(h if index else 2 * h)
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes | {"norm.weight": (h,), "lm_head.weight": (self.vocab_size, h)}

    def mapping_shapes(self) -> tuple[Shapes, Shapes]:
        """Return the shapes of the mapping tensors that a folder must have, and of all that it may have.

        ``d2t`` is required if the vocabulary is reduced.
        """
        mapping: Shapes = {"d2t": (self.vocab_size,), "t2d": (self.target_vocab_size,)}
        return {"d2t": mapping["d2t"]} if self.reduced else {}, mapping

    def parallel_hints(self) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the layers, the head, and ``fc`` along its inputs.

        Tokens are not divided: the number of rows and mask tokens need not be a multiple of the number of
        ranks.
        """
        own = TensorParallelHints(
            columns={"lm_head": self.vocab_size},
            rows={"fc": self.num_captured * self.hidden_size},
            whole_inputs=("fc",),
            enters=("layers.0.hidden_norm",),
            leaves=("fc",),
            vocab_mask="t2d" if self.reduced else "",
        )
        layers = (self.layer_hints(f"layers.{index}") for index in range(self.num_layers))
        return replace(sum(layers, own), each_token=())

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return the captured layers, and the mask token from the first present of vLLM's fields for it."""
        found = {
            "captured": read_layers((fields, _LAYERS), (own, _LAYERS), folder),
            MASK_TOKEN: parallel_mask_token(fields),
        }
        return super().read_own(fields, own, folder) | found

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "bias": False,
            "use_aux_hidden_state": True,
            **({} if self.captured is None else {"num_aux_hidden_states": len(self.captured)}),
        }

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        total = self.target_vocab_size
        if self.vocab_size > total:
            return f"a draft vocabulary of {self.vocab_size} exceeds the target's {total}"
        if self.mask_token_id >= total:
            return f"mask_token_id={self.mask_token_id} is not below the vocabulary's {total}"
        return super().problem()

    def to_json(self, target: TargetSpec) -> Json:
        """Return the config.json fields that vLLM reads: fields of an Eagle3 draft, and the mask token."""
        layers = self.layer_ids(target.num_layers)
        return {
            **head_fields(ARCHITECTURE, "llama", target),
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
            **end_fields(self, target),
            "num_aux_hidden_states": len(layers),
            _LAYERS: list(layers),
            "eagle_config": {"use_aux_hidden_state": True, _LAYERS: [layer - 1 for layer in layers]},
            MASK_TOKEN: self.mask_token_id,
        }
