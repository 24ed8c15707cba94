"""Captures by an engine, received as a trainer receives them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from spec_core import Engine, Transport
from spec_core.records import CaptureRequest, FeatureSchema

LIMIT_S = 300.0
WINDOW_BYTES = 1 << 28


def captured(
    engine: Engine, transport: Transport, schema: FeatureSchema, requests: Sequence[CaptureRequest]
) -> list[torch.Tensor]:
    """Return each request's states, float32 on the CPU: [T, N, H]. Their ids and destinations are set here."""
    with transport.listen(schema, WINDOW_BYTES) as receiver:
        sent = [
            replace(request, request_id=index, destinations=(receiver.address,))
            for index, request in enumerate(requests)
        ]
        done = engine.capture(sent, schema)
        states = {}
        for _ in sent:
            sample = receiver.receive(LIMIT_S)
            assert tuple(sample.input_ids.tolist()) == requests[sample.request_id].input_ids
            states[sample.request_id] = sample.hidden_TNH.to("cpu", torch.float32, copy=True)
            receiver.release(sample)
        done.result(LIMIT_S)
    return [states[index] for index in range(len(requests))]
