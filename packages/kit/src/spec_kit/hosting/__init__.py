"""This library is for engines that run the target in separate processes (docs/libraries/hosting.md)."""

from typing import TYPE_CHECKING

from spec_kit.hosting.answer_counts import AnswerCounts, AnswerRounds
from spec_kit.hosting.capture_controller import CAPTURE_VARIABLE
from spec_kit.hosting.draft_middleware import DraftMiddleware
from spec_kit.hosting.draft_rank import DraftRank
from spec_kit.hosting.draft_ranks import DraftRanks
from spec_kit.hosting.feature_exporter import FeatureExporter
from spec_kit.hosting.futures import then
from spec_kit.hosting.image_fields import image_fields, image_of_fields
from spec_kit.hosting.modes import CaptureMode, Fields, Mode, PlainMode, SpeculativeMode
from spec_kit.hosting.program_arguments import unreserved
from spec_kit.hosting.program_replicas import DRAFT_TOKEN_VARIABLE, CapturedRows, HttpReplica, ProgramReplica
from spec_kit.hosting.subprocess_engine import SubprocessEngine
from spec_kit.hosting.subprocess_main import EngineLink
from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.hosting.engine_subprocess import EngineSubprocess
    from spec_kit.hosting.program_version import installed_version, probe_version
    from spec_kit.hosting.vocabulary_shard import shard_products, sum_of_shards
else:
    __getattr__ = lazy_names(__name__, __file__, extra="hosting")

__all__ = [
    "CAPTURE_VARIABLE",
    "DRAFT_TOKEN_VARIABLE",
    "AnswerCounts",
    "AnswerRounds",
    "CaptureMode",
    "CapturedRows",
    "DraftMiddleware",
    "DraftRank",
    "DraftRanks",
    "EngineLink",
    "EngineSubprocess",
    "FeatureExporter",
    "Fields",
    "HttpReplica",
    "Mode",
    "PlainMode",
    "ProgramReplica",
    "SpeculativeMode",
    "SubprocessEngine",
    "image_fields",
    "image_of_fields",
    "installed_version",
    "probe_version",
    "shard_products",
    "sum_of_shards",
    "then",
    "unreserved",
]
