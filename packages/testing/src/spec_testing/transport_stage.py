"""A Stage creates samples, senders and receivers for the test functions of TransportSuite."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
import torch

from spec_core import FeatureReceiver, FeatureSender, Transport
from spec_core.errors import DeadlineExceeded, RunError
from spec_core.records import FeatureSample, FeatureSchema
from spec_testing.limits import patient
from spec_testing.processes import Fault, Rank

SCHEMA = FeatureSchema(layers=(1, 3, 8), hidden_size=16, dtype="float32")
UNIT = 10
"""Number of tokens of an ordinary sample."""
UNIT_BYTES = UNIT * (8 + 3 * 16 * 4)
LONG_S, SHORT_S, GRACE_S = patient(15.0), 0.4, patient(3.0)
"""Seconds: a timeout that should not be reached, a timeout that a test waits for, and the tolerance for a busy
machine."""
FAULT = "the fault"


class Play(Protocol):
    """Runs a test function on every rank and returns each rank's result."""

    def __call__(self, part: Callable[..., Any], world_size: int, /, *args: Any) -> list[Any]:
        """Run the test function ``part`` on ``world_size`` ranks and return the results in rank order."""
        ...


class Fail(Protocol):
    """Runs a test function on every rank, with a fault in one rank."""

    def __call__(self, part: Callable[..., Any], fault: Fault, victim: int, world_size: int = 2, /) -> Any:
        """Run the test function ``part`` with ``fault`` in rank ``victim``, and return a survivor's result."""
        ...


@dataclass(frozen=True)
class Stage:
    """Creates the samples, senders and receivers of the transport under test."""

    build: Callable[[], Transport]
    device: str

    @contextlib.contextmanager
    def receiver(
        self, me: Rank, window_bytes: int = 8 * UNIT_BYTES, schema: FeatureSchema = SCHEMA
    ) -> Generator[FeatureReceiver]:
        """Yield a receiver, after publishing its address to the sending ranks."""
        with self.build().listen(schema, window_bytes) as receiver:
            me.publish(receiver.address)
            yield receiver

    def sender(self, me: Rank, schema: FeatureSchema = SCHEMA) -> FeatureSender:
        """Return a sender that is connected to the receiver."""
        return self.build().connect(me.receive(), schema, LONG_S)

    def sample(
        self, request_id: int, num_tokens: int = UNIT, schema: FeatureSchema = SCHEMA
    ) -> FeatureSample:
        """Return a sample that is bitwise equal for equal arguments in every process; it includes NaNs."""
        generator = torch.Generator().manual_seed(request_id)
        ids = torch.randint(0, 1 << 40, (num_tokens,), generator=generator)
        size = num_tokens * schema.bytes_per_token()
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        hidden = raw.view(schema.torch_dtype()).view(schema.shape(num_tokens))
        return FeatureSample(
            request_id=request_id, input_ids=ids.to(self.device), hidden_TNH=hidden.to(self.device)
        )

    def check(self, got: FeatureSample, request_id: int, num_tokens: int = UNIT) -> None:
        """Assert that ``got`` equals sample ``request_id`` of the default schema, bit for bit."""
        assert got.request_id == request_id
        assert same(got, self.sample(request_id, num_tokens))


def same(left: FeatureSample, right: FeatureSample) -> bool:
    """Return whether two samples are equal, bit for bit."""
    return (
        left.input_ids.dtype == right.input_ids.dtype
        and left.hidden_TNH.dtype == right.hidden_TNH.dtype
        and left.hidden_TNH.shape == right.hidden_TNH.shape
        and left.hidden_TNH.device.type == right.hidden_TNH.device.type
        and torch.equal(left.input_ids, right.input_ids)
        and torch.equal(
            left.hidden_TNH.reshape(-1).view(torch.uint8), right.hidden_TNH.reshape(-1).view(torch.uint8)
        )
    )


def take(stage: Stage, receiver: FeatureReceiver, request_id: int, num_tokens: int = UNIT) -> None:
    """Receive one sample, check it and release it."""
    got = receiver.receive(LONG_S)
    stage.check(got, request_id, num_tokens)
    receiver.release(got)


def expect_deadline(call: Callable[[], object], timeout_s: float) -> None:
    """Assert that ``call`` raises DeadlineExceeded, neither early nor late (T6)."""
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        call()
    assert timeout_s * 0.9 <= time.monotonic() - started < timeout_s + GRACE_S


def error_of(call: Callable[[], object], timeout_s: float) -> str:
    """Return the name of the error that ``call`` raises within its timeout."""
    started = time.monotonic()
    with pytest.raises(RunError) as error:
        call()
    assert time.monotonic() - started < timeout_s + GRACE_S
    return error.type.__name__
