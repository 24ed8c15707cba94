"""This library is for drafts and for engines that decode with them (docs/libraries/drafting.md)."""

from typing import TYPE_CHECKING

from spec_kit.drafting.decoder_shape import (
    FP8_MULTIPLE,
    CapturedLayers,
    DecoderConfig,
    DecoderShape,
    DistilledLoss,
    decoder_fields,
    end_fields,
)
from spec_kit.drafting.draft_checks import Flaw, ServedFolder, check_served
from spec_kit.drafting.draft_files import (
    Json,
    Shapes,
    Size,
    architectures,
    as_served,
    checked,
    config_error,
    parallel_mask_token,
    present,
    read_config,
    section,
    write_draft,
)
from spec_kit.drafting.draft_folder import recognise
from spec_kit.drafting.draft_shape import DraftShape, head_fields, layer_range_problem, read_layers
from spec_kit.drafting.latent_shape import LatentShape
from spec_kit.drafting.served_draft import EMBEDDING, DraftCheckpoint, ServedDraft, head_problem
from spec_kit.drafting.step_cost import FROZEN, TEACHER, TRAINED, StepCost, num_weights
from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.drafting.batch_proposer import BatchProposer
    from spec_kit.drafting.checkpointing import checkpointed
    from spec_kit.drafting.context_rows import ContextRows
    from spec_kit.drafting.decoder_parts import INIT_STD, AttentionProjections, Mlp, linear
    from spec_kit.drafting.draft_vocabulary import MAPPING, mapping, read_mapping, select_tokens
    from spec_kit.drafting.drawing import draw, uniform_numbers
    from spec_kit.drafting.fp8 import Fp8Kernels, Fp8Layers, Fp8Weight, use_fp8_head
    from spec_kit.drafting.initial_weights import start_from_target
    from spec_kit.drafting.latent_attention import LatentAttention
    from spec_kit.drafting.loss_parts import LabelColumns, sharded_logsumexp_argmax, with_gradients
    from spec_kit.drafting.plain_kernels import DecoderKernels, Distribution, softmax
    from spec_kit.drafting.rope import Rope, rotate
    from spec_kit.drafting.row_loss import ROW_LOSSES, Teacher, score, teach
    from spec_kit.drafting.sequence_caches import cached_attention, extended_caches, new_positions
    from spec_kit.drafting.target_ops import TargetOps
    from spec_kit.drafting.verification import Verdict, distribution, verify_greedy, verify_sampled
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "EMBEDDING",
    "FP8_MULTIPLE",
    "FROZEN",
    "INIT_STD",
    "MAPPING",
    "ROW_LOSSES",
    "TEACHER",
    "TRAINED",
    "AttentionProjections",
    "BatchProposer",
    "CapturedLayers",
    "ContextRows",
    "DecoderConfig",
    "DecoderKernels",
    "DecoderShape",
    "DistilledLoss",
    "Distribution",
    "DraftCheckpoint",
    "DraftShape",
    "Flaw",
    "Fp8Kernels",
    "Fp8Layers",
    "Fp8Weight",
    "Json",
    "LabelColumns",
    "LatentAttention",
    "LatentShape",
    "Mlp",
    "Rope",
    "ServedDraft",
    "ServedFolder",
    "Shapes",
    "Size",
    "StepCost",
    "TargetOps",
    "Teacher",
    "Verdict",
    "architectures",
    "as_served",
    "cached_attention",
    "check_served",
    "checked",
    "checkpointed",
    "config_error",
    "decoder_fields",
    "distribution",
    "draw",
    "end_fields",
    "extended_caches",
    "head_fields",
    "head_problem",
    "layer_range_problem",
    "linear",
    "mapping",
    "new_positions",
    "num_weights",
    "parallel_mask_token",
    "present",
    "read_config",
    "read_layers",
    "read_mapping",
    "recognise",
    "rotate",
    "score",
    "section",
    "select_tokens",
    "sharded_logsumexp_argmax",
    "softmax",
    "start_from_target",
    "teach",
    "uniform_numbers",
    "use_fp8_head",
    "verify_greedy",
    "verify_sampled",
    "with_gradients",
    "write_draft",
]
