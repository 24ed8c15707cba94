"""A sender on one GPU and a receiver on another one, and the samples that travel over NCCL between them."""

import contextlib
import time
from collections.abc import Generator

import pytest
import torch

from spec_backend_cuda.backend import CudaBackend, CudaConfig
from spec_core import FeatureReceiver, FeatureSender, Transport
from spec_core.records import FeatureSample, FeatureSchema
from spec_testing.processes import Rank

AVAILABILITY = CudaBackend.probe()
NUM_DEVICES = CudaBackend.capabilities().num_devices
SCHEMA = FeatureSchema(layers=(1, 2), hidden_size=1024, dtype="bfloat16")
TOKENS = 2048
SAMPLE_BYTES = TOKENS * (8 + SCHEMA.bytes_per_token())

LONG_S, SHORT_S = 30.0, 0.5


def multi_gpu(test):
    reason = f"two GPUs are needed, this process sees {NUM_DEVICES}"
    return pytest.mark.multi_gpu(pytest.mark.skipif(NUM_DEVICES < 2, reason=reason)(test))


class OnTwoGpus(Transport):
    """Receives on the first GPU and sends from the second one."""

    def listen(self, schema: FeatureSchema, window_bytes: int, host: str = "") -> FeatureReceiver:
        torch.cuda.set_device(0)
        return nccl().listen(schema, window_bytes)

    def connect(self, address: str, schema: FeatureSchema, timeout_s: float) -> FeatureSender:
        torch.cuda.set_device(1)
        return nccl().connect(address, schema, timeout_s)


def nccl() -> Transport:
    return CudaBackend(CudaConfig(name="cuda")).transport("disaggregated")


def sample(number: int, tokens: int = TOKENS) -> FeatureSample:
    hidden = torch.full(SCHEMA.shape(tokens), float(number % 256), dtype=torch.bfloat16, device="cuda")
    ids = torch.full((tokens,), number, device="cuda")
    return FeatureSample(request_id=number, input_ids=ids, hidden_TNH=hidden)


def check(got: FeatureSample, number: int, tokens: int = TOKENS) -> None:
    assert got.hidden_TNH.device == torch.device("cuda", 0)
    assert (got.request_id, len(got.input_ids)) == (number, tokens)
    assert bool((got.input_ids == number).all())
    assert bool((got.hidden_TNH == float(number % 256)).all())


def take(receiver: FeatureReceiver, number: int, tokens: int = TOKENS) -> None:
    got = receiver.receive(LONG_S)
    check(got, number, tokens)
    receiver.release(got)


@contextlib.contextmanager
def listening(me: Rank, window_bytes: int) -> Generator[FeatureReceiver]:
    with OnTwoGpus().listen(SCHEMA, window_bytes) as receiver:
        me.publish(receiver.address)
        yield receiver


def device_is_idle(limit_s: float = 5.0) -> None:
    """No kernel of a transfer is left that waits for somebody who is gone."""
    started = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - started < limit_s
