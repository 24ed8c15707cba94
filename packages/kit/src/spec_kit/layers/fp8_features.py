"""Encode captured states in 8-bit floating point where an engine sends them, and decode them into a batch.

An encoded row has H + 4 bytes: its H values in e4m3, then the float32 by which they are multiplied. It maps the row's
largest magnitude to 448, the largest number of e4m3. A row with infinity or NaN is decoded to NaN only.

Shapes: T tokens, N captured layers, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spec_kit.layers.fp8 import FORWARD, quantize_rows

if TYPE_CHECKING:
    from torch import Tensor

    from spec_core.records import FeatureSchema

_ROWS = 4096
"""Rows that are converted at once; they are wide for a moment, in float32."""


def encode_features(hidden_TNH: Tensor, schema: FeatureSchema) -> Tensor:
    """Return states [T, N, H] as ``schema.sent`` has them: unchanged, or uint8 [T, N, H + 4]."""
    if schema.sent_dtype == "target":
        return hidden_TNH
    size = schema.hidden_size
    rows = hidden_TNH.flatten(0, 1)
    sent = torch.empty(schema.sent.shape(len(hidden_TNH)), dtype=torch.uint8, device=rows.device)
    for part, encoded in zip(rows.split(_ROWS), sent.flatten(0, 1).split(_ROWS), strict=True):
        values, scale = quantize_rows(part, FORWARD)
        encoded[:, :size] = values.view(torch.uint8)
        encoded[:, size:] = scale.view(torch.uint8)
    return sent


def decode_features(sent_TNH: Tensor, into_TNH: Tensor) -> None:
    """Copy states to ``into_TNH``, a part of a batch; rows that are longer there than here were encoded."""
    if sent_TNH.shape == into_TNH.shape:
        into_TNH.copy_(sent_TNH)
        return
    size = into_TNH.shape[-1]
    rows = sent_TNH.to(into_TNH.device, non_blocking=True).flatten(0, 1)
    for encoded, decoded in zip(rows.split(_ROWS), into_TNH.flatten(0, 1).split(_ROWS), strict=True):
        scale = encoded[:, size:].contiguous().view(torch.float32)
        decoded.copy_(encoded[:, :size].view(FORWARD).float() * scale)
