"""This library is for drafts and for engines that decode with them (docs/libraries/drafting.md)."""

from typing import TYPE_CHECKING

from spec_kit.drafting.decoder_shape import (
    DecoderConfig,
    DecoderShape,
    DistilledLoss,
    decoder_fields,
    end_fields,
)
from spec_kit.drafting.draft_checkpoint import DraftCheckpoint
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
from spec_kit.drafting.draft_shape import DraftShape, head_fields
from spec_kit.drafting.latent_shape import LatentShape
from spec_kit.drafting.quantised_draft import QUANTISATION
from spec_kit.drafting.served_draft import ServedDraft
from spec_kit.drafting.speculators_layout import write_speculators
from spec_kit.drafting.step_cost import FROZEN, TEACHER, TRAINED, StepCost, num_weights
from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.drafting.batch_proposer import BatchProposer
    from spec_kit.drafting.draft_module import build_module
    from spec_kit.drafting.drawing import uniform_numbers
    from spec_kit.drafting.guesses import Guesses
    from spec_kit.drafting.verification import Verdict, distribution, verify_greedy, verify_sampled
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "FROZEN",
    "QUANTISATION",
    "TEACHER",
    "TRAINED",
    "BatchProposer",
    "DecoderConfig",
    "DecoderShape",
    "DistilledLoss",
    "DraftCheckpoint",
    "DraftShape",
    "Flaw",
    "Guesses",
    "Json",
    "LatentShape",
    "ServedDraft",
    "ServedFolder",
    "Shapes",
    "Size",
    "StepCost",
    "Verdict",
    "architectures",
    "as_served",
    "build_module",
    "check_served",
    "checked",
    "config_error",
    "decoder_fields",
    "distribution",
    "end_fields",
    "head_fields",
    "num_weights",
    "parallel_mask_token",
    "present",
    "read_config",
    "recognise",
    "section",
    "uniform_numbers",
    "verify_greedy",
    "verify_sampled",
    "write_draft",
    "write_speculators",
]
