"""What vLLM captures is what Transformers computes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from spec_core.cpu.shared_memory_transport import SharedMemoryTransport
from spec_core.records import CaptureRequest, FeatureSchema

from .conftest import BATCH_TOKENS, MAX_LENGTH, Transformer
from .vllm_here import needs_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spec_core import FeatureReceiver

pytestmark = needs_vllm

LIMIT_S = 120.0
LAYERS = (0, 2, 4, 5, 8)
"""The embeddings, 2, N / 2, N − 3, and N: the input of the final norm."""
LENGTHS = (5, 1, 17, MAX_LENGTH, 30, 2 * BATCH_TOKENS + 7, BATCH_TOKENS, 3)
"""One token, a whole batch of them, and prompts that take three batches and more."""


@pytest.fixture
def schema() -> FeatureSchema:
    return FeatureSchema(layers=LAYERS, hidden_size=64, dtype="float32")


@pytest.fixture
def receiver(schema: FeatureSchema) -> Iterator[FeatureReceiver]:
    with SharedMemoryTransport().listen(schema, 1 << 24) as receiver:
        yield receiver


@pytest.mark.parametrize("target", ["llama", "qwen3"])
def test_states_equal_those_of_transformers(request, target, sharing_engine, schema, receiver) -> None:
    folder = request.getfixturevalue(target)
    draw = random.Random(2)
    rows = [tuple(draw.randrange(97) for _ in range(length)) for length in LENGTHS]
    requests = [
        CaptureRequest(sample_id=index, input_ids=ids, destination=receiver.address)
        for index, ids in enumerate(rows)
    ]
    sharing_engine(folder).capture(requests, schema).result(LIMIT_S)
    reference = Transformer(folder)
    for _ in rows:
        sample = receiver.receive(LIMIT_S)
        assert tuple(sample.input_ids.tolist()) == rows[sample.sample_id]
        expected_TNH = reference.hidden(rows[sample.sample_id])[:, list(LAYERS)]
        errors_N = (sample.hidden_TNH - expected_TNH).abs().amax(dim=(0, 2))
        scales_N = expected_TNH.abs().amax(dim=(0, 2))
        assert (errors_N <= 1e-4 * scales_N).all(), (len(sample.input_ids), (errors_N / scales_N).tolist())
        receiver.release(sample)
