"""Define the packets of a feature stream between sender and receiver (``FramedSocket``).

::

    sender                      receiver
    ConnectRequest (JSON)  ->                       token, schema, the device that its tensors are on
                           <-   ConnectReply (JSON) window and the pool's descriptor or offer, or the reason
                                                    for a refusal
    REQUEST n, tokens      ->                       requests a block for a sample of that many tokens
                           <-   GRANT n, offset     perhaps much later, when other samples were released;
                                                    the payload describes the block
    DATA    n, position    ->                       bytes of the sample at a position of its block, if the block
                                                    is on another host
    READY   n, request id  ->                       the block is filled, or its transfer has started
    WITHDRAW n             ->                       instead of READY: cancels request n, granted or not
    CLOSE                  ->                       a connection that ends without it was lost

Threat model: the address contains a token, without which a process is refused. The kernel ensures that a peer
over a Unix socket runs under the same user. A peer that has the token may write anywhere in the pool. Tokens and
packets are not encrypted, so TCP must only be used in a private network.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import pydantic

from spec_core.errors import ProtocolError
from spec_core.records import FeatureSchema
from spec_kit.streams.shared_memory import aligned

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.records import FeatureSample

VERSION = 3
MAX_PACKET_BYTES = 1 << 16


class PacketKind(enum.IntEnum):
    """Kind of a packet, which is its first field."""

    REQUEST = 1
    GRANT = 2
    READY = 3
    WITHDRAW = 4
    CLOSE = 5
    DATA = 6


class Packet(NamedTuple):
    """Any packet after the first packet of each side. ``number``: number of the request."""

    kind: PacketKind
    number: int = 0
    value: int = 0
    payload: bytes = b""

    def encode(self) -> bytes:
        """Return the packet's bytes."""
        return _HEADER.pack(self.kind, self.number, self.value) + self.payload

    @classmethod
    def decode(cls, data: bytes) -> Packet:
        """Parse a packet. Raise ProtocolError for invalid bytes."""
        try:
            kind, number, value = _HEADER.unpack_from(data)
            return cls(PacketKind(kind), number, value, data[_HEADER.size :])
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"{len(data)} bytes are no packet of a feature stream") from error


_HEADER = struct.Struct("<QQq")
MAX_DATA_BYTES = MAX_PACKET_BYTES - _HEADER.size
"""Largest payload of a packet in bytes."""


@dataclass(frozen=True)
class ConnectRequest:
    """A sender's first packet."""

    token: str
    schema: FeatureSchema
    device_id: str = ""
    """Name of the sender's device, ``SenderConnector.device_id``."""
    version: int = VERSION
    sender: str = ""
    """Name of the sender's process, for messages, if the receiver cannot read its pid from the socket."""

    def encode(self) -> bytes:
        """Return the request as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> ConnectRequest:
        """Parse a request. Raise ProtocolError for invalid bytes or another protocol version."""
        try:
            request = pydantic.TypeAdapter(cls).validate_json(data)
        except pydantic.ValidationError as error:
            raise ProtocolError(f"a first packet of {len(data)} bytes that asks for no stream") from error
        if request.version != VERSION:
            raise ProtocolError(f"the peer speaks version {request.version}, not {VERSION}")
        return request


@dataclass(frozen=True)
class ConnectReply:
    """The receiver's first packet."""

    window_bytes: int = 0
    pool_bytes: int = 0
    pool: str = "host"
    """Kind of the pool's memory, ``ReceiverPool.kind``."""
    offer: str = ""
    """Text with which the sender finds the pool, ``ReceiverPool.offer``."""
    refusal: str = ""
    schema_differs: bool = False

    def encode(self) -> bytes:
        """Return the reply as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> ConnectReply:
        """Parse a reply. Raise ProtocolError for invalid bytes."""
        try:
            return pydantic.TypeAdapter(cls).validate_json(data)
        except pydantic.ValidationError as error:
            raise ProtocolError(f"an answer of {len(data)} bytes that is no reply") from error


class SampleLayout:
    """Layout of a sample's two tensors in its block: first the ids, then the hidden states, each aligned."""

    def __init__(self, schema: FeatureSchema) -> None:
        """Compute the layout of samples of ``schema``."""
        self._schema = schema
        self._dtype = schema.torch_dtype()
        self._hidden_bytes = schema.bytes_per_token()

    def sample_bytes(self, num_tokens: int) -> int:
        """Return the number of bytes that a sample uses of the window; equals ``FeatureSample.num_bytes``."""
        return num_tokens * (_ID_BYTES + self._hidden_bytes)

    def block_bytes(self, num_tokens: int) -> int:
        """Return the size of a sample's block in bytes, with padding."""
        return aligned(num_tokens * _ID_BYTES) + aligned(num_tokens * self._hidden_bytes)

    def parts(self, sample: FeatureSample) -> tuple[tuple[int, Tensor], tuple[int, Tensor]]:
        """Return the position in the block and the bytes (uint8 on the host) of each tensor of a sample."""
        import torch

        ids, hidden = sample.input_ids, sample.hidden_TNH
        return (
            (0, ids.cpu().contiguous().view(torch.uint8)),
            (aligned(len(ids) * _ID_BYTES), hidden.detach().cpu().contiguous().view(-1).view(torch.uint8)),
        )

    def view(self, memory: Tensor, offset: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return views of ``input_ids`` and ``hidden_TNH`` in the block at ``offset`` of ``memory``."""
        import torch

        start = offset + aligned(num_tokens * _ID_BYTES)
        ids = memory[offset : offset + num_tokens * _ID_BYTES].view(torch.int64)
        hidden = memory[start : start + num_tokens * self._hidden_bytes].view(self._dtype)
        return ids, hidden.view(self._schema.shape(num_tokens))

    def fits(self, sample: FeatureSample) -> bool:
        """Return whether a sample's dtypes and shapes agree with the schema."""
        import torch

        ids, hidden = sample.input_ids, sample.hidden_TNH
        return (
            ids.dtype == torch.int64
            and ids.dim() == 1
            and hidden.dtype == self._dtype
            and tuple(hidden.shape) == self._schema.shape(len(ids))
        )


_ID_BYTES = 8
