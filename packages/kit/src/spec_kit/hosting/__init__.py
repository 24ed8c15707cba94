"""This library is for engines that run the target in separate processes (docs/libraries/hosting.md)."""

from typing import TYPE_CHECKING

from spec_kit.hosting.answer_counts import AnswerCounts, AnswerRounds
from spec_kit.hosting.backend_search import backend_for
from spec_kit.hosting.capture_controller import CAPTURE_VARIABLE
from spec_kit.hosting.draft_middleware import DraftMiddleware
from spec_kit.hosting.draft_rank import DraftRank
from spec_kit.hosting.draft_ranks import DraftRanks
from spec_kit.hosting.engine_subprocess import EngineSubprocess
from spec_kit.hosting.feature_exporter import FeatureExporter
from spec_kit.hosting.image_fields import image_fields, image_of_fields
from spec_kit.hosting.live_answers import LiveAnswer, passed_on
from spec_kit.hosting.live_requests import (
    LEARN_HEADER,
    LIVE_REQUESTS_VARIABLE,
    OTHER_LABEL,
    Label,
    LiveRequest,
    LiveRequests,
    LiveRequestsConfig,
    TakenRequests,
    is_label,
)
from spec_kit.hosting.modes import CaptureMode, Fields, Mode, PlainMode, SpeculativeMode
from spec_kit.hosting.program_arguments import unreserved
from spec_kit.hosting.program_log import logged_errors
from spec_kit.hosting.program_version import installed_version, probe_version
from spec_kit.hosting.replicas import DRAFT_TOKEN_VARIABLE, CapturedRows, HttpReplica, ProgramReplica
from spec_kit.hosting.served_states import (
    MOST_STATE_ROWS,
    STATES_ARGUMENT,
    StatesLayout,
    StatesRange,
    piece_rows,
    states_key,
)
from spec_kit.hosting.server_metrics import ServerMetrics
from spec_kit.hosting.subprocess_engine import SubprocessEngine
from spec_kit.hosting.subprocess_main import EngineLink
from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.hosting.state_copies import StateCopies, StepBatch
    from spec_kit.hosting.state_rows import StateRows
    from spec_kit.hosting.vocabulary_shard import shard_products, sum_of_shards
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "CAPTURE_VARIABLE",
    "DRAFT_TOKEN_VARIABLE",
    "LEARN_HEADER",
    "LIVE_REQUESTS_VARIABLE",
    "MOST_STATE_ROWS",
    "OTHER_LABEL",
    "STATES_ARGUMENT",
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
    "Label",
    "LiveAnswer",
    "LiveRequest",
    "LiveRequests",
    "LiveRequestsConfig",
    "Mode",
    "PlainMode",
    "ProgramReplica",
    "ServerMetrics",
    "SpeculativeMode",
    "StateCopies",
    "StateRows",
    "StatesLayout",
    "StatesRange",
    "StepBatch",
    "SubprocessEngine",
    "TakenRequests",
    "backend_for",
    "image_fields",
    "image_of_fields",
    "installed_version",
    "is_label",
    "logged_errors",
    "passed_on",
    "piece_rows",
    "probe_version",
    "shard_products",
    "states_key",
    "sum_of_shards",
    "unreserved",
]
