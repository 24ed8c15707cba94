"""Library for engines whose program runs the target in processes of its own (docs/libraries/hosting.md)."""

from spec_core.hosting.backend_search import backend_for
from spec_core.hosting.capture_controller import CAPTURE_VARIABLE
from spec_core.hosting.draft_middleware import DraftMiddleware
from spec_core.hosting.draft_rank import DraftRank
from spec_core.hosting.draft_ranks import DraftRanks
from spec_core.hosting.engine_subprocess import EngineSubprocess
from spec_core.hosting.feature_exporter import FeatureExporter
from spec_core.hosting.http_client import check_draft_token, server_address
from spec_core.hosting.modes import CaptureMode, Fields, Mode, PlainMode, SpeculativeMode
from spec_core.hosting.program_arguments import unreserved
from spec_core.hosting.program_version import installed_version, probe_version
from spec_core.hosting.replicas import DRAFT_TOKEN_VARIABLE, HttpReplica, ProgramReplica
from spec_core.hosting.subprocess_engine import SubprocessEngine
from spec_core.hosting.subprocess_main import EngineLink

__all__ = [
    "CAPTURE_VARIABLE",
    "DRAFT_TOKEN_VARIABLE",
    "CaptureMode",
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
    "backend_for",
    "check_draft_token",
    "installed_version",
    "probe_version",
    "server_address",
    "unreserved",
]
