"""EngineCaptureSuite has the tests of EngineSuite on captured features (E1–E3, E9, E17), and their fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from spec_core import Engine, EngineContext, FeatureReceiver, Placement, Transport
from spec_core.errors import DeadlineExceeded, EngineError, SpecError
from spec_core.records import CaptureRequest, FeatureSchema
from spec_testing.answer_checks import ReferenceTarget
from spec_testing.captured import assert_rounded, assert_states_close, receive_copies, requests_to
from spec_testing.conformance import ConformanceSuite
from spec_testing.frozen_checks import assert_frozen_products
from spec_testing.limits import patient
from spec_testing.reference import reference_backend

LIMIT_S = patient(120.0)
WINDOW_BYTES = 1 << 24


class EngineCaptureSuite(ConformanceSuite):
    """Tests of what an engine captures, and the fixtures of all tests of an engine."""

    placement: ClassVar[Placement] = "inline"
    """Placement by which features reach the test process."""

    @pytest.fixture
    def new_engine(self) -> Callable[[EngineContext], Engine]:
        """Return a function that creates the engine for an EngineContext."""
        raise pytest.UsageError("an EngineSuite needs a fixture 'new_engine': EngineContext -> Engine")

    @pytest.fixture
    def reference(self) -> ReferenceTarget:
        """Return the engine's target, run by code that is independent of the engine."""
        raise pytest.UsageError("an EngineSuite needs a fixture 'reference': a ReferenceTarget")

    @pytest.fixture
    def transport(self) -> Transport:
        """Return the transport that the test process listens on."""
        return reference_backend().transport(self.placement)

    @pytest.fixture
    def context(self, transport: Transport) -> EngineContext:
        """Return the EngineContext for the engine under test."""
        own = transport if self.placement == "inline" else None
        return EngineContext(backend=reference_backend(), placement=self.placement, transport=own)

    @pytest.fixture
    def engine(
        self, new_engine: Callable[[EngineContext], Engine], context: EngineContext
    ) -> Iterator[Engine]:
        """Yield the engine under test, and close it after the test."""
        with new_engine(context) as engine:
            yield engine

    @pytest.fixture
    def schema(self, engine: Engine) -> FeatureSchema:
        """Return a schema with the first, a middle and the last layer that can be captured."""
        layers = (0, engine.target.num_layers // 2, engine.target.num_layers)
        return FeatureSchema(layers=layers, hidden_size=engine.target.hidden_size, dtype="float32")

    @pytest.fixture
    def receivers(self, transport: Transport, schema: FeatureSchema) -> Iterator[list[FeatureReceiver]]:
        """Yield two receivers, as if there were two trainer ranks."""
        with transport.listen(schema, WINDOW_BYTES) as one, transport.listen(schema, WINDOW_BYTES) as other:
            yield [one, other]

    def test_e1_one_sample_per_request_at_its_destination(
        self, engine: Engine, schema: FeatureSchema, receivers: list[FeatureReceiver]
    ) -> None:
        """E1: each request sends one sample with its ids to each of its destinations, and to no other."""
        requests = requests_to(engine, [r.address for r in receivers])
        engine.capture(requests, schema).result(LIMIT_S)
        for receiver in receivers:
            wanted = {r.request_id: r.input_ids for r in requests if receiver.address in r.destinations}
            got = receive_copies(receiver, len(wanted))
            assert {s.request_id: tuple(s.input_ids.tolist()) for s in got} == wanted
            with pytest.raises(DeadlineExceeded):
                receiver.receive(0.05)

    def test_e2_states_are_the_targets(
        self,
        engine: Engine,
        schema: FeatureSchema,
        receivers: list[FeatureReceiver],
        reference: ReferenceTarget,
    ) -> None:
        """E2: states of layer k equal the input of target layer k or of the final norm, in any batch."""
        requests = requests_to(engine, [receivers[0].address])
        engine.capture(requests, schema).result(LIMIT_S)
        together = {s.request_id: s.hidden_TNH for s in receive_copies(receivers[0], len(requests))}
        engine.capture(requests[:1], schema).result(LIMIT_S)
        (alone,) = receive_copies(receivers[0], 1)
        assert_states_close(alone.hidden_TNH, together[requests[0].request_id])
        for request in requests:
            expected_TNH = reference.hidden(request.input_ids)[:, list(schema.layers)]
            assert_states_close(together[request.request_id], expected_TNH)

    def test_e2_states_are_sent_as_the_schema_says(
        self, engine: Engine, schema: FeatureSchema, transport: Transport, reference: ReferenceTarget
    ) -> None:
        """E2: states in 8 bits are those of the target, rounded."""
        in_8_bits = replace(schema, sent_dtype="fp8_e4m3")
        with transport.listen(in_8_bits.sent, WINDOW_BYTES) as receiver:
            requests = requests_to(engine, [receiver.address])
            engine.capture(requests, in_8_bits).result(LIMIT_S)
            samples = {s.request_id: s for s in receive_copies(receiver, len(requests))}
        for request in requests:
            expected_TNH = reference.hidden(request.input_ids)[:, list(schema.layers)]
            assert_rounded(samples[request.request_id].hidden_TNH, expected_TNH)

    def test_e3_future_is_done_when_all_is_sent(
        self, engine: Engine, schema: FeatureSchema, receivers: list[FeatureReceiver]
    ) -> None:
        """E3: once the future is done, every sample can be received without waiting for the engine."""
        requests = requests_to(engine, [receivers[0].address])
        assert engine.capture(requests, schema).result(LIMIT_S) is None
        engine.close()
        assert len(receive_copies(receivers[0], len(requests))) == len(requests)

    def test_e3_failed_send_ends_in_the_future(
        self, engine: Engine, schema: FeatureSchema, receivers: list[FeatureReceiver]
    ) -> None:
        """E3: if a destination is lost, the future raises, and the engine continues to serve."""
        requests = requests_to(engine, [receivers[1].address])
        receivers[1].close()
        error = engine.capture(requests, schema).exception(LIMIT_S)
        assert isinstance(error, SpecError), (
            f"the future ended with {error!r}, not with the error of the send"
        )
        engine.capture(requests_to(engine, [receivers[0].address]), schema).result(LIMIT_S)

    def test_e3_failed_target_ends_in_the_future(
        self, engine: Engine, schema: FeatureSchema, receivers: list[FeatureReceiver]
    ) -> None:
        """E3: if the target does not have a token, the future raises, and the engine continues to serve."""
        impossible = CaptureRequest(
            request_id=0, input_ids=(engine.target.vocab_size,), destinations=(receivers[0].address,)
        )
        error = engine.capture([impossible], schema).exception(LIMIT_S)
        assert isinstance(error, SpecError), f"the future ended with {error!r}, not with an EngineError"
        engine.capture(requests_to(engine, [receivers[0].address]), schema).result(LIMIT_S)

    def test_e9_started_engine_captures(
        self, engine: Engine, schema: FeatureSchema, receivers: list[FeatureReceiver]
    ) -> None:
        """E9: ``start`` makes the engine ready for a schema; it may be called again."""
        engine.start(schema)
        engine.start(schema)
        engine.health()
        requests = requests_to(engine, [receivers[0].address])
        engine.capture(requests, schema).result(LIMIT_S)
        assert len(receive_copies(receivers[0], len(requests))) == len(requests)

    def test_e9_start_refuses_what_the_target_does_not_have(
        self, engine: Engine, schema: FeatureSchema
    ) -> None:
        """E9: ``start`` raises EngineError for a layer beyond the target's last; the engine still serves."""
        beyond = replace(schema, layers=(engine.target.num_layers + 1,))
        with pytest.raises(EngineError):
            engine.start(beyond)
        engine.start(schema)
        engine.health()

    def test_e17_frozen_products_are_the_targets(
        self, engine: Engine, schema: FeatureSchema, tmp_path: Path
    ) -> None:
        """E17: the products are those of the target's folder, and not those of another embedding or head."""
        engine.start(schema)
        assert_frozen_products(engine, tmp_path)
