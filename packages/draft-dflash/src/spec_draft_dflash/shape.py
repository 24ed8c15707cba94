"""Define DFlashShape: a DFlash draft's sizes and options, read from and written to config.json."""

from __future__ import annotations

from spec_core import TargetSpec
from spec_kit.block_drafting import BlockShape
from spec_kit.drafting import Json

ARCHITECTURE = "DFlashDraftModel"


class DFlashShape(BlockShape):
    """The sizes of one DFlash draft."""

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            "sample_from_anchor": False,
            "projector_type": None,
            "conv_kernel_size": 0,
            "selector_rank": 0,
        }

    def problem(self) -> str | None:
        """Return why no block draft can have this shape, or None."""
        if self.block_size < 2:
            return f"block_size={self.block_size} leaves no slot to guess"
        return super().problem()

    def to_json(self, target: TargetSpec) -> Json:
        """Return the fields of config.json that both engines read.

        The captured layers are written in both conventions: index i means the output of layer i in
        ``target_layer_ids``, and the input of layer i in the top-level list, which vLLM reads first.
        """
        return {
            **self.backbone_fields(ARCHITECTURE, target, tied=target.tied),
            "block_size": self.block_size,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "dflash_config": {"block_size": self.block_size, **self.nested_fields},
        }
