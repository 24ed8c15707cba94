"""KeptStates gives a run, in place of an engine, the hidden states that servers captured for requests.

Shapes: T tokens, N captured layers, H hidden size.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from spec_core.errors import EngineError, SpecError
from spec_core.records import FeatureSample
from spec_trainer.run.dispatch import CapturerSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from spec_core import FeatureSender, Transport
    from spec_core.records import FeatureSchema
    from spec_kit.hosting import HttpReplica
    from spec_kit.live_traffic.live_requests import LiveRequest
    from spec_trainer.run.dispatch import Capturer, SampleReference
    from spec_trainer.run.spec import RunSpec


def take_states(server: HttpReplica, request: LiveRequest, schema: FeatureSchema) -> Tensor | str:
    """Return the hidden states [T, N, H] that a server captured for a request, or why it has none.

    T is one less than the request's tokens, because the target never ran the last token of the answer. The
    server deletes the states.
    """
    token_ids = [*request.prompt, *request.answer][:-1]
    if request.states is None:
        return "no_states"
    if len(token_ids) <= len(request.prompt):
        return "one_token"
    rows = server.take_states(request.states, len(token_ids), schema)
    if isinstance(rows, str):
        return rows
    if np.frombuffer(rows.token_ids, "<i4").tolist() != token_ids:
        return "other_tokens"
    return torch.frombuffer(rows.states, dtype=schema.torch_dtype()).view(schema.shape(len(token_ids)))


class KeptStates(CapturerSource):
    """Sends kept hidden states to the trainer rank of this process, as an engine sends captured features."""

    def __init__(
        self, states: Callable[[], Mapping[bytes, Tensor]], transport: Transport, timeout_s: float
    ) -> None:
        """Prepare to send hidden states over ``transport``.

        The function ``states`` returns the hidden states of each kept sample, by the bytes of its token ids.
        """
        self._states = states
        self._transport = transport
        self._timeout_s = timeout_s
        self._senders: dict[str, FeatureSender] = {}

    def capturer(self, part: RunSpec) -> Capturer:
        """Return a Capturer that sends samples of ``part`` with their kept hidden states to trainer ranks.

        This method calls the constructor's function ``states``, and the Capturer uses its result. The Capturer sends
        in the calling thread, so its future is already done.
        """
        return partial(self._capture, part, self._states())

    def close(self) -> None:
        """Close the connections. Idempotent."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _capture(
        self, part: RunSpec, states: Mapping[bytes, Tensor], samples: Sequence[SampleReference]
    ) -> Future[None]:
        sent: Future[None] = Future()
        try:
            for sample in samples:
                self._send(part, states, sample)
            sent.set_result(None)
        except (SpecError, KeyError) as error:
            sent.set_exception(
                error if isinstance(error, SpecError) else EngineError("a sample has no states")
            )
        return sent

    def _send(self, part: RunSpec, states: Mapping[bytes, Tensor], sample: SampleReference) -> None:
        ids = part.dataset.sample(sample.sample_id).input_ids
        features = FeatureSample(
            request_id=sample.request_id,
            input_ids=torch.from_numpy(ids.astype(np.int64)),
            hidden_TNH=states[ids.tobytes()],
        )
        for address in sample.destinations:
            if address not in self._senders:
                self._senders[address] = self._transport.connect(address, part.schema, self._timeout_s)
            self._senders[address].send(features, self._timeout_s)
