"""Define DFlash2Shape: a DFlash2 draft's sizes, read from and written to config.json."""

from __future__ import annotations

from dataclasses import replace

from spec_core import TargetSpec
from spec_kit.block_drafting import BlockShape
from spec_kit.drafting import Json, Shapes, Size
from spec_kit.sharding import TensorParallelHints

ARCHITECTURE = "DFlash2DraftModel"
OWN_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_CONVOLUTIONS = ("attention_conv", "mlp_conv")


class DFlash2Shape(BlockShape):
    """The sizes of one DFlash2 draft."""

    block_size: Size
    conv_kernel_size: Size
    conv_group_size: Size
    selector_rank: Size
    selector_top_k: Size

    @property
    def conv_taps(self) -> int:
        """Number of taps computed from a slot's state, for a sub-layer's input and output and all groups."""
        return 2 * self.conv_kernel_size * (self.hidden_size // self.conv_group_size)

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every trained tensor, convolutions and selector included."""
        h, r, vocabulary = self.hidden_size, self.selector_rank, self.target_vocab_size
        own: Shapes = {
            "candidate_selector.predecessor_codebook": (vocabulary, r),
            "candidate_selector.successor_codebook": (vocabulary, r),
            "candidate_selector.hidden_projection.weight": (r, h),
        }
        for name in self._convolutions:
            own |= {
                f"{name}.base_kernel": (2, self.conv_kernel_size, h),
                f"{name}.kernel_projection.weight": (self.conv_taps, h),
            }
        return super().tensor_shapes() | own

    def parallel_hints(self) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the draft.

        A sub-layer's output is summed over ranks after its convolution, which every rank applies to its own
        summand. Each rank therefore also computes only a summand of the taps' gradient. Every rank has the
        whole selector.
        """
        hints = super().parallel_hints()
        inner = {f"{layer}.{name}" for layer in self.layer_names for name in ("self_attn.o_proj", "mlp")}
        leaves = tuple(name for name in hints.leaves if name not in inner)
        return replace(hints, leaves=leaves + self._convolutions, partial=hints.partial + self._convolutions)

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            "draft_vocab_size": self.target_vocab_size,  # engines take a candidate's row for its token
            "sample_from_anchor": False,
            "projector_type": None,
            "input_embedding_scale": 1.0,
        }

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        if self.block_size < 2:
            return f"block_size={self.block_size} leaves no slot to guess"
        if self.conv_kernel_size > self.block_size:
            return f"conv_kernel_size={self.conv_kernel_size} is more than a block of {self.block_size} has"
        if self.hidden_size % self.conv_group_size:
            return f"conv_group_size={self.conv_group_size} does not divide the width {self.hidden_size}"
        if self.selector_top_k > self.target_vocab_size:
            return (
                f"selector_top_k={self.selector_top_k} is more than the vocabulary's {self.target_vocab_size}"
            )
        return super().problem()

    def to_json(self, target: TargetSpec) -> Json:
        """Return the fields of config.json that vLLM from 0.28 on and SGLang from 0.5.19 on read.

        The captured layers are written in both conventions, as in a DFlash draft: index i means the output of
        layer i in ``target_layer_ids``, and the input of layer i in the top-level list.
        """
        return {
            **self.backbone_fields(ARCHITECTURE, target, tied=target.tied),
            "block_size": self.block_size,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "dflash_config": {
                "block_size": self.block_size,
                **self.nested_fields,
                **{name: getattr(self, name) for name in OWN_FIELDS},
            },
        }

    @property
    def _convolutions(self) -> tuple[str, ...]:
        return tuple(f"{layer}.{name}" for layer in self.layer_names for name in _CONVOLUTIONS)
