"""This library has the parts of decoder layers and of losses that drafts share (docs/libraries/layers.md)."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.layers.checkpointing import checkpointed
    from spec_kit.layers.context_rows import ContextRows
    from spec_kit.layers.decoder_parts import INIT_STD, AttentionProjections, Mlp, linear
    from spec_kit.layers.fp8 import Fp8Layers, use_fp8_head
    from spec_kit.layers.fp8_features import encode_features
    from spec_kit.layers.latent_attention import LatentAttention
    from spec_kit.layers.loss_parts import (
        LabelColumns,
        probabilities,
        sharded_logsumexp_argmax,
        with_gradients,
    )
    from spec_kit.layers.packed_rows import PackedRows, as_wide, rows_of_pieces
    from spec_kit.layers.plain_kernels import DecoderKernels, Distribution, RmsNorm, softmax
    from spec_kit.layers.rope import Rope, rotate
    from spec_kit.layers.rounds import are_refused, with_rounds
    from spec_kit.layers.row_loss import ROW_LOSSES, Teacher, reverse_kl, score, teach
    from spec_kit.layers.sequence_caches import cached_attention, extended_caches, new_positions
    from spec_kit.layers.target_ops import TargetOps
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "INIT_STD",
    "ROW_LOSSES",
    "AttentionProjections",
    "ContextRows",
    "DecoderKernels",
    "Distribution",
    "Fp8Layers",
    "LabelColumns",
    "LatentAttention",
    "Mlp",
    "PackedRows",
    "RmsNorm",
    "Rope",
    "TargetOps",
    "Teacher",
    "are_refused",
    "as_wide",
    "cached_attention",
    "checkpointed",
    "encode_features",
    "extended_caches",
    "linear",
    "new_positions",
    "probabilities",
    "reverse_kl",
    "rotate",
    "rows_of_pieces",
    "score",
    "sharded_logsumexp_argmax",
    "softmax",
    "teach",
    "use_fp8_head",
    "with_gradients",
    "with_rounds",
]
