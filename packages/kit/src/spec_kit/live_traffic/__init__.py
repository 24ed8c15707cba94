"""This library is for engines that record live requests and hidden states (docs/libraries/live_traffic.md)."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names
from spec_kit.live_traffic.live_answers import LiveAnswer, passed_on
from spec_kit.live_traffic.live_requests import (
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
from spec_kit.live_traffic.served_states import (
    STATES_ARGUMENT,
    StatesLayout,
    StatesRange,
    states_key,
)
from spec_kit.live_traffic.server_metrics import ServerMetrics

if TYPE_CHECKING:
    from spec_kit.live_traffic.state_copies import StateCopies, StepBatch
    from spec_kit.live_traffic.state_rows import StateRows
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "LEARN_HEADER",
    "LIVE_REQUESTS_VARIABLE",
    "OTHER_LABEL",
    "STATES_ARGUMENT",
    "Label",
    "LiveAnswer",
    "LiveRequest",
    "LiveRequests",
    "LiveRequestsConfig",
    "ServerMetrics",
    "StateCopies",
    "StateRows",
    "StatesLayout",
    "StatesRange",
    "StepBatch",
    "TakenRequests",
    "is_label",
    "passed_on",
    "states_key",
]
