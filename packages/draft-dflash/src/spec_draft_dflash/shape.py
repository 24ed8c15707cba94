"""Define DFlashShape: a DFlash draft's sizes and options, read from and written to config.json."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from spec_core import TargetSpec
from spec_draft_dflash.config import LayerType
from spec_kit.block_drafting import BlockShape
from spec_kit.drafting import Json, Size

ARCHITECTURE = "DFlashDraftModel"
FULL, SLIDING = get_args(LayerType)


class DFlashShape(BlockShape):
    """The sizes of one DFlash draft."""

    layer_types: tuple[LayerType, ...]
    sliding_window: Size | None = None
    """Number of positions to which a sliding layer's query attends, its own position included; None without
    sliding layers."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer, in positions; None means full attention."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def is_causal(self) -> bool | None:
        """Whether attention inside a block is causal; None if the layers differ."""
        kinds = set(self.layer_types)
        return None if len(kinds) > 1 else kinds == {SLIDING}

    @classmethod
    def read_own(cls, fields: Json, own: Json, folder: Path) -> Json:
        """Return the fields that ``BlockShape`` reads, and the window of sliding layers."""
        both, found = fields | own, super().read_own(fields, own, folder)
        # Base configurations have a window that no layer uses.
        window = (
            both.get("swa_window_size", both.get("sliding_window"))
            if SLIDING in found["layer_types"]
            else None
        )
        return found | {"sliding_window": window}

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            "sample_from_anchor": False,
            "projector_type": None,
            "conv_kernel_size": 0,
            "selector_rank": 0,
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
        return super().problem()

    def to_json(self, target: TargetSpec) -> Json:
        """Return the fields of config.json that both engines read.

        vLLM 0.32 and SGLang 0.5.23 read ``is_causal`` first, for all layers at once. vLLM 0.26 and SGLang
        0.5.16 do not know this field. Without it, all versions take sliding layers as causal and full layers
        as not causal. Transformers drops a ``sliding_window`` that is not declared as used. The captured
        layers are written in both conventions: index i means the output of layer i in ``target_layer_ids``,
        and the input of layer i in the top-level list, which vLLM reads first.
        """
        causal = self.is_causal
        return {
            **self.backbone_fields(ARCHITECTURE, target, tied=target.tied),
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_layers,
            **({} if causal is None else {"is_causal": causal}),
            "block_size": self.block_size,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": self.output_ids,
            },
        }
