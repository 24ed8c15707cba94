"""Functions that make requests of captures, and receive and compare what an engine has captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spec_core import Engine, FeatureReceiver
from spec_core.records import CaptureRequest, FeatureSample
from spec_testing.answer_checks import token_rows
from spec_testing.limits import patient

_LIMIT_S = patient(120.0)
_TOLERANCE = 1e-4
"""Tolerance relative to the largest value: float32 rounding in batches of different shapes."""


def requests_to(engine: Engine, destinations: Sequence[str]) -> list[CaptureRequest]:
    """Return requests of many lengths (also 1 token), spread over the destinations; some go to all."""
    dealt = [tuple(destinations), *((destination,) for destination in destinations)] * 6
    return [
        CaptureRequest(request_id=100 + index, input_ids=tuple(ids), destinations=dealt[index])
        for index, ids in enumerate(token_rows(engine, (5, 1, 17, 9, 3, 30)))
    ]


def receive_copies(receiver: FeatureReceiver, count: int) -> list[FeatureSample]:
    """Receive ``count`` samples and return copies, as released samples may be overwritten (T4)."""
    samples: list[FeatureSample] = []
    for _ in range(count):
        got = receiver.receive(_LIMIT_S)
        samples.append(replace(got, input_ids=got.input_ids.clone(), hidden_TNH=got.hidden_TNH.clone()))
        receiver.release(got)
    return samples


def assert_states_close(got_TNH: Tensor, expected_TNH: Tensor) -> None:
    """Assert that states are equal up to rounding."""
    scale = float(expected_TNH.abs().max())
    torch.testing.assert_close(got_TNH.cpu(), expected_TNH.cpu(), rtol=0, atol=_TOLERANCE * scale)


def assert_rounded(sent_TNH: Tensor, expected_TNH: Tensor) -> None:
    """Assert that states that were sent in 8 bits are equal to others up to the rounding of e4m3."""
    expected = expected_TNH.double().cpu()
    scale_TN1 = sent_TNH[..., -4:].cpu().contiguous().view(torch.float32).double()
    got = sent_TNH[..., :-4].cpu().view(torch.float8_e4m3fn).double() * scale_TN1
    # Half of the last of three bits, or of the smallest number; and what the states themselves may differ by.
    rounding = torch.maximum(expected.abs() * 2.0**-4, scale_TN1 * 2.0**-10)
    assert bool(((got - expected).abs() <= rounding + _TOLERANCE * expected.abs().max()).all())
