"""Define the sizes of drafts that choose among candidates, read from and written to config.json."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from pydantic import NonNegativeInt

from spec_core import TargetSpec
from spec_kit.block_drafting import BlockShape
from spec_kit.drafting import Json, Shapes, Size
from spec_kit.sharding import TensorParallelHints

_CONVOLUTIONS = ("attention_conv", "mlp_conv")


class CandidateShape(BlockShape):
    """The sizes of a draft that chooses among candidates, and whose layers may have convolutions."""

    architecture: ClassVar[str]
    """Name in ``architectures`` of config.json."""
    own_fields: ClassVar[tuple[str, ...]]
    """Fields that BlockShape does not have, which config.json stores under the same names unless they are 0."""

    block_size: Size
    conv_kernel_size: NonNegativeInt
    conv_group_size: NonNegativeInt

    @property
    @abstractmethod
    def num_candidates(self) -> int:
        """Number of candidates of a guess."""

    @property
    def conv_taps(self) -> int:
        """Number of taps computed from a slot's state, for a sub-layer's input and output and all groups."""
        return 2 * self.conv_kernel_size * (self.hidden_size // self.conv_group_size)

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every trained tensor of the backbone, convolutions included."""
        shapes = super().tensor_shapes()
        for name in self._convolutions:
            shapes |= {
                f"{name}.base_kernel": (2, self.conv_kernel_size, self.hidden_size),
                f"{name}.kernel_projection.weight": (self.conv_taps, self.hidden_size),
            }
        return shapes

    def parallel_hints(self) -> TensorParallelHints:
        """Return how tensor-parallel ranks divide the draft.

        A sub-layer's output is summed over ranks after its convolution, which every rank applies to its own
        summand. Each rank therefore also computes only a summand of the taps' gradient. Every rank has all that
        chooses among candidates.
        """
        hints = super().parallel_hints()
        convolutions = self._convolutions
        if not convolutions:
            return hints
        inner = {f"{layer}.{name}" for layer in self.layer_names for name in ("self_attn.o_proj", "mlp")}
        leaves = tuple(name for name in hints.leaves if name not in inner)
        return replace(hints, leaves=leaves + convolutions, partial=hints.partial + convolutions)

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {
            "sample_from_anchor": False,
            "input_embedding_scale": 1.0,
        }

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        if self.block_size < 2:
            return f"block_size={self.block_size} leaves no slot to guess"
        if self.conv_kernel_size > self.block_size:
            return f"conv_kernel_size={self.conv_kernel_size} is more than a block of {self.block_size} has"
        if bool(self.conv_kernel_size) != bool(self.conv_group_size):
            return (
                f"conv_kernel_size={self.conv_kernel_size} and conv_group_size={self.conv_group_size}: both or "
                "neither must be 0"
            )
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            return f"conv_group_size={self.conv_group_size} does not divide the width {self.hidden_size}"
        return super().problem()

    def to_json(self, target: TargetSpec) -> Json:
        """Return the fields of config.json that vLLM and SGLang read.

        The captured layers are written in both conventions, as in a DFlash draft: index i means the output of
        layer i in ``target_layer_ids``, and the input of layer i in the top-level list.
        """
        return {
            **self.backbone_fields(self.architecture, target, tied=target.tied),
            "block_size": self.block_size,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "dflash_config": {
                "block_size": self.block_size,
                **self.nested_fields,
                **{name: size for name in self.own_fields if (size := getattr(self, name))},
            },
        }

    @property
    def _convolutions(self) -> tuple[str, ...]:
        names = _CONVOLUTIONS if self.conv_kernel_size else ()
        return tuple(f"{layer}.{name}" for layer in self.layer_names for name in names)


class DFlash2Shape(CandidateShape):
    """The sizes of one DFlash2 draft."""

    architecture: ClassVar[str] = "DFlash2DraftModel"
    own_fields: ClassVar[tuple[str, ...]] = (
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
    )

    conv_kernel_size: Size
    conv_group_size: Size
    selector_rank: Size
    selector_top_k: Size

    @property
    def num_candidates(self) -> int:
        """Number of candidates of a guess."""
        return self.selector_top_k

    def tensor_shapes(self) -> Shapes:
        """Return name and shape of every trained tensor, convolutions and selector included."""
        h, r, vocabulary = self.hidden_size, self.selector_rank, self.target_vocab_size
        return super().tensor_shapes() | {
            "candidate_selector.predecessor_codebook": (vocabulary, r),
            "candidate_selector.successor_codebook": (vocabulary, r),
            "candidate_selector.hidden_projection.weight": (r, h),
        }

    def fixed_fields(self) -> Json:
        """Return fields of a published draft's config.json for which only the given value is supported."""
        return super().fixed_fields() | {"projector_type": None}

    def problem(self) -> str | None:
        """Return why no draft can have this shape, or None."""
        if self.selector_top_k > self.vocab_size:
            return f"selector_top_k={self.selector_top_k} is more than the vocabulary's {self.vocab_size}"
        return super().problem()
