"""This library is for engines that record live requests and hidden states (docs/libraries/live_traffic.md)."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names
from spec_kit.live_traffic.live_answers import LiveAnswer, passed_on
from spec_kit.live_traffic.live_requests import LIVE_REQUESTS_VARIABLE, LiveRequests, LiveRequestsConfig
from spec_kit.live_traffic.served_states import STATES_ARGUMENT, states_key
from spec_kit.live_traffic.server_metrics import ServerMetrics

if TYPE_CHECKING:
    from spec_kit.live_traffic.state_copies import StateCopies, StepBatch
    from spec_kit.live_traffic.state_rows import StateRows
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "LIVE_REQUESTS_VARIABLE",
    "STATES_ARGUMENT",
    "LiveAnswer",
    "LiveRequests",
    "LiveRequestsConfig",
    "ServerMetrics",
    "StateCopies",
    "StateRows",
    "StepBatch",
    "passed_on",
    "states_key",
]
