"""Samples of two layers, a window for many of them, and senders through shared memory."""

import torch

from spec_core.records import FeatureSample, FeatureSchema
from spec_kit.streams.shared_memory_transport import SharedMemoryTransport

SCHEMA = FeatureSchema(layers=(2, 5), hidden_size=8, dtype="bfloat16")
WINDOW = 1 << 16
LONG_S, SHORT_S = 10.0, 0.3


def sample(request_id: int = 7, num_tokens: int = 5) -> FeatureSample:
    generator = torch.Generator().manual_seed(request_id)
    return FeatureSample(
        request_id=request_id,
        input_ids=torch.arange(num_tokens),
        hidden_TNH=torch.randn(num_tokens, 2, 8, generator=generator).bfloat16(),
    )


def connect(receiver, timeout_s: float = LONG_S):
    return SharedMemoryTransport().connect(receiver.address, SCHEMA, timeout_s)
