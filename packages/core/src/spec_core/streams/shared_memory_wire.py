"""What the two ends of SharedMemoryTransport say to each other: one Unix-socket packet per record.

::

    sender                      receiver
    hello  (JSON, once)    ->                       token, schema, where its tensors are
                           <-   welcome (JSON)      window and the arena's descriptor or offer, or the reason
                                                    for refusal
    REQUEST n, tokens      ->                       room for a sample of that many tokens
                           <-   GRANT n, offset     perhaps much later, when others have been released;
                                                    with the memory's note, if it has one
    READY   n, sample id   ->                       the block at that offset is filled, or on its way
    WITHDRAW n             ->                       instead of READY: forget request n, granted or not
    BYE                    ->                       a farewell; a connection that ends without it was cut

Threat model: the token, part of the address, keeps out strangers and stale processes; the kernel vouches that the
peer runs under the same user. A peer that holds the token may write anywhere in the arena.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

from spec_core.errors import ProtocolError
from spec_core.records import FeatureSample, FeatureSchema
from spec_core.streams.shared_memory import aligned

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
MAX_PACKET_BYTES = 1 << 16


class Kind(enum.IntEnum):
    REQUEST = 1
    GRANT = 2
    READY = 3
    WITHDRAW = 4
    BYE = 5


class Record(NamedTuple):
    kind: Kind
    number: int = 0
    value: int = 0
    note: bytes = b""

    def encode(self) -> bytes:
        return _RECORD.pack(self.kind, self.number, self.value) + self.note


_RECORD = struct.Struct("<QQq")


def decode(packet: bytes) -> Record:
    try:
        kind, number, value = _RECORD.unpack_from(packet)
        return Record(Kind(kind), number, value, packet[_RECORD.size :])
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a packet of {len(packet)} bytes is no record") from error


@dataclass(frozen=True)
class Hello:
    token: str
    schema: FeatureSchema
    place: str = ""
    """``SenderEnd.place``."""
    version: int = VERSION
    who: str = ""
    """The sender, for messages, where the kernel does not know it."""


@dataclass(frozen=True)
class Welcome:
    window_bytes: int = 0
    arena_bytes: int = 0
    memory: str = "host"
    """``ReceiverMemory.kind``."""
    offer: str = ""
    """``ReceiverMemory.offer``."""
    refusal: str = ""
    schema_differs: bool = False


def encode_json(greeting: Hello | Welcome) -> bytes:
    return json.dumps(asdict(greeting)).encode()


def decode_hello(packet: bytes) -> Hello:
    """ProtocolError for whatever is not exactly a hello of this version: truncated, forged or foreign."""
    try:
        fields = json.loads(packet)
        if fields["version"] != VERSION:
            raise ProtocolError(f"the peer speaks version {fields['version']}, not {VERSION}")
        schema = fields["schema"]
        layers = tuple(int(layer) for layer in schema["layers"])
        agreed = FeatureSchema(
            layers=layers, hidden_size=int(schema["hidden_size"]), dtype=str(schema["dtype"])
        )
        return Hello(
            str(fields["token"]), agreed, str(fields.get("place", "")), who=str(fields.get("who", ""))
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a first record of {len(packet)} bytes that is no hello") from error


def decode_welcome(packet: bytes) -> Welcome:
    try:
        return Welcome(**json.loads(packet))
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"an answer of {len(packet)} bytes that is no welcome") from error


class Layout:
    """Where a sample's two tensors lie in its block: ids first, then the hidden states, each aligned."""

    def __init__(self, schema: FeatureSchema) -> None:
        self._schema = schema
        self._dtype = schema.torch_dtype()
        self._hidden_bytes = schema.bytes_per_token()

    def sample_bytes(self, num_tokens: int) -> int:
        """What counts against the window; equals ``FeatureSample.num_bytes``."""
        return num_tokens * (_ID_BYTES + self._hidden_bytes)

    def block_bytes(self, num_tokens: int) -> int:
        return aligned(num_tokens * _ID_BYTES) + aligned(num_tokens * self._hidden_bytes)

    def view(self, arena: Tensor, offset: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """``input_ids`` and ``hidden_TNH`` in the block at ``offset``, not copied."""
        import torch

        start = offset + aligned(num_tokens * _ID_BYTES)
        ids = arena[offset : offset + num_tokens * _ID_BYTES].view(torch.int64)
        hidden = arena[start : start + num_tokens * self._hidden_bytes].view(self._dtype)
        return ids, hidden.view(self._schema.shape(num_tokens))

    def fits(self, sample: FeatureSample) -> bool:
        """Whether a sample is what the schema says."""
        import torch

        ids, hidden = sample.input_ids, sample.hidden_TNH
        return (
            ids.dtype == torch.int64
            and ids.dim() == 1
            and hidden.dtype == self._dtype
            and tuple(hidden.shape) == self._schema.shape(len(ids))
        )


_ID_BYTES = 8
