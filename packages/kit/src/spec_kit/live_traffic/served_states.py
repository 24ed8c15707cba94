"""Define the messages by which a client reads the hidden states of requests that a server has served.

The route is ``/spec/draft/states``. A client first asks for the layout, with the body ``{}``. Then it asks for the
rows of each request, piece by piece. A piece is binary: the token ids of its rows as little-endian int32, then their
states.
"""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

from spec_core.records import FeatureSchema
from spec_core.wire_record import WireRecord

STATES_ARGUMENT = "spec_states"
"""Key in a request's further sampling parameters (vLLM: ``extra_args``, SGLang: ``custom_params``). Its value is
the name under which the request's states are captured."""
MOST_STATE_ROWS = 16_384
"""Largest number of rows of a request: the tokens of the longest request that a server stores."""
PIECE_BYTES = 8 << 20
"""Largest number of bytes of a piece, unless one row is larger. The engine does no step while it copies a piece."""
ID_BYTES = 4

StatesKey = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{16}$")]
"""Name of a request's states at its server."""

LeftOutReason = Annotated[str, pydantic.Field(pattern=r"^[a-z_]{1,32}$")]
"""Why a request, or its states, were left out: a name that fits every page and file."""


class StatesRange(WireRecord):
    """A client's query for hidden states of one served request, from row ``first`` on.

    A row has the states of one token. The server deletes a request's states when the client has read the last row.
    """

    key: StatesKey
    first: Annotated[int, pydantic.Field(ge=0, lt=MOST_STATE_ROWS)]
    """Position of the first row."""
    rows: Annotated[int, pydantic.Field(ge=1, le=MOST_STATE_ROWS)]
    """Number of rows of the request that the client needs in all, from position 0."""


class StatesLayout(WireRecord):
    """The content of a row of states: the fields of a FeatureSchema."""

    layers: Annotated[list[int], pydantic.Field(min_length=1)]
    hidden_size: Annotated[int, pydantic.Field(ge=1)]
    dtype: Annotated[str, pydantic.Field(pattern=r"^[a-z]+[0-9]+[a-z0-9_]*$")]

    def to_schema(self) -> FeatureSchema:
        """Return the layout as a FeatureSchema."""
        return FeatureSchema(layers=tuple(self.layers), hidden_size=self.hidden_size, dtype=self.dtype)

    @classmethod
    def of(cls, schema: FeatureSchema) -> StatesLayout:
        """Return the layout of ``schema``."""
        return cls(layers=list(schema.layers), hidden_size=schema.hidden_size, dtype=schema.dtype)


class StatesLeftOut(WireRecord):
    """Answer for a request whose states are missing or incomplete."""

    left_out: LeftOutReason
    """Why states are missing."""


def piece_rows(schema: FeatureSchema) -> int:
    """Return the largest number of rows of a piece."""
    return max(1, PIECE_BYTES // (schema.bytes_per_token() + ID_BYTES))


def states_key(parameters: Any) -> str | None:
    """Return the key under which a request must be captured; None if it must not be captured.

    ``parameters``: the request's further sampling parameters. They come from a client and may have any type.
    """
    key = parameters.get(STATES_ARGUMENT) if isinstance(parameters, dict) else None
    return key if isinstance(key, str) else None
