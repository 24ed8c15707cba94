"""A WireRecord is a value that processes exchange as JSON, and that is checked when it is read."""

from __future__ import annotations

from typing import Self

import pydantic

from spec_core.errors import ProtocolError
from spec_core.foreign import foreign_errors


class WireRecord(pydantic.BaseModel):
    """Base of values that processes exchange as JSON, without pickle.

    Records are frozen and strictly typed; unknown fields are errors.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def encode(self) -> bytes:
        """Return the value as JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, data: bytes | str) -> Self:
        """Return the value that ``data`` encodes as JSON. Raise ProtocolError if it does not."""
        with foreign_errors(ProtocolError, f"{len(data)} bytes that are no {cls.__name__}"):
            return cls.model_validate_json(data)
