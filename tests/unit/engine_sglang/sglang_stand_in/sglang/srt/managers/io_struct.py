"""SGLang's question for the scheduler's state, and the answer."""

from dataclasses import dataclass


@dataclass
class GetInternalStateReq:
    rid: str | None = None


@dataclass
class GetInternalStateReqOutput:
    internal_state: dict
