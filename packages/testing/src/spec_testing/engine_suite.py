"""EngineSuite tests the contract of spec_core.engine (E1–E14, E17–E20) against an independent computation.

::

    from spec_testing import EngineSuite, ReferenceTarget, draw_draft

    class TestMyEngine(EngineSuite):
        @pytest.fixture
        def new_engine(self, target) -> Callable[[EngineContext], Engine]:
            return lambda context: MyEngine.create(MyConfig(name="mine"), target, context)

        @pytest.fixture
        def reference(self, target) -> ReferenceTarget: ...

        @pytest.fixture
        def draft_folder(self, target, tmp_path) -> Path:
            return draw_draft(tmp_path / "draft", target, seed=0)

Shapes: T tokens, N layers of the target, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from spec_core import DraftReplica, Engine, EngineContext, FeatureReceiver, Placement, Transport
from spec_core.errors import ArtifactError, DeadlineExceeded, EngineError, SpecError
from spec_core.records import AcceptanceCounters, CaptureRequest, FeatureSchema, Generation, SamplingParams
from spec_kit.drafting import recognise
from spec_testing.answer_checks import (
    FirstToken,
    ReferenceTarget,
    assert_ends_at_end_tokens,
    assert_follows_distribution,
    assert_guess_depths,
    assert_samples_without_seeds,
    assert_takes_requests_as_answers_end,
    assert_times,
    greedy_answer,
    token_rows,
)
from spec_testing.captured import assert_rounded, assert_states_close, receive_copies, requests_to
from spec_testing.conformance import ConformanceSuite
from spec_testing.frozen_checks import assert_frozen_products
from spec_testing.limits import patient
from spec_testing.reference import reference_backend

LIMIT_S = patient(120.0)
WINDOW_BYTES = 1 << 24
GREEDY = SamplingParams(max_new_tokens=12, stop_at_eos=False)
SPECULATING = replace(GREEDY, num_draft_tokens=3)


class EngineSuite(ConformanceSuite):
    """Tests of an engine. A subclass defines fixtures ``new_engine``, ``reference``, ``draft_folder``.

    ``draft_folder`` is only needed by engines that can load a draft. The engine must compute in float32. For
    an engine that starts further processes, set ``placement`` to ``colocated``.
    """

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
    def draft_folder(self) -> Path:
        """Return the folder of an exported draft for the engine's target, which the engine can load."""
        pytest.skip("no draft_folder fixture: this engine is not tested with a draft")

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
        self,
        engine: Engine,
        schema: FeatureSchema,
        transport: Transport,
        reference: ReferenceTarget,
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
        assert isinstance(engine.capture(requests, schema).exception(LIMIT_S), SpecError)
        engine.capture(requests_to(engine, [receivers[0].address]), schema).result(LIMIT_S)

    def test_e3_failed_target_ends_in_the_future(
        self, engine: Engine, schema: FeatureSchema, receivers: list[FeatureReceiver]
    ) -> None:
        """E3: if the target does not have a token, the future raises, and the engine continues to serve."""
        impossible = CaptureRequest(
            request_id=0, input_ids=(engine.target.vocab_size,), destinations=(receivers[0].address,)
        )
        assert isinstance(engine.capture([impossible], schema).exception(LIMIT_S), SpecError)
        engine.capture(requests_to(engine, [receivers[0].address]), schema).result(LIMIT_S)

    def test_e4_greedy_is_plain_decoding(self, engine: Engine, reference: ReferenceTarget) -> None:
        """E4: without a draft each token is the target's arg-max; answers are in the order of the prompts."""
        prompts = _prompts(engine)
        for prompt, answer in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
            assert list(answer.token_ids) == greedy_answer(reference, prompt, GREEDY.max_new_tokens)

    def test_e4_greedy_with_a_draft_is_plain_decoding(
        self, engine: Engine, reference: ReferenceTarget, draft_folder: Path
    ) -> None:
        """E4: with a draft the greedy answers stay the same, token by token."""
        engine.load_draft(draft_folder)
        prompts = _prompts(engine)
        answers = engine.generate(prompts, SPECULATING)
        assert [list(a.token_ids) for a in answers] == [
            greedy_answer(reference, prompt, GREEDY.max_new_tokens) for prompt in prompts
        ]

    def test_e4_samples_follow_the_targets_distribution(
        self, engine: Engine, reference: ReferenceTarget
    ) -> None:
        """E4: sampled answers follow the target's distribution."""
        assert_follows_distribution(engine, reference, num_draft_tokens=0)

    def test_e4_samples_with_a_draft_follow_the_targets_distribution(
        self, engine: Engine, reference: ReferenceTarget, draft_folder: Path
    ) -> None:
        """E4: sampled answers with a draft follow the target's distribution, whatever the draft proposes."""
        engine.load_draft(draft_folder)
        assert_follows_distribution(engine, reference, num_draft_tokens=3)

    def test_e5_refused_draft_changes_nothing(self, engine: Engine, tmp_path: Path) -> None:
        """E5: a folder that is no draft raises ArtifactError, and the engine answers as before."""
        prompts = _prompts(engine)
        before = _tokens(engine.generate(prompts, GREEDY))
        (tmp_path / "config.json").write_text('{"architectures": ["NotADraft"]}')
        for folder in (tmp_path, tmp_path / "missing"):
            with pytest.raises(ArtifactError, match=folder.name):
                engine.load_draft(folder)
        assert _tokens(engine.generate(prompts, GREEDY)) == before

    def test_e5_damaged_draft_leaves_the_loaded_one(
        self, engine: Engine, draft_folder: Path, tmp_path: Path
    ) -> None:
        """E5: a damaged folder is refused as a whole; the draft that was loaded, and its counters, stay."""
        engine.load_draft(draft_folder)
        engine.generate(_prompts(engine), SPECULATING)
        before = engine.acceptance()
        for file in draft_folder.iterdir():
            (tmp_path / file.name).write_bytes(
                file.read_bytes()[: -8 if file.suffix == ".safetensors" else None]
            )
        with pytest.raises(ArtifactError):
            engine.load_draft(tmp_path)
        assert engine.acceptance() == before

    def test_e5_acceptance_counts_from_the_last_load(self, engine: Engine, draft_folder: Path) -> None:
        """E5, E11, E12, E13: counters agree with each other and with the answers; times, if any, ascend."""
        assert engine.acceptance() == AcceptanceCounters()
        engine.load_draft(draft_folder)
        answers = engine.generate(_prompts(engine), replace(SPECULATING, with_times=True, concurrency=2))
        counted = engine.acceptance()
        assert_times(answers)
        assert_guess_depths(engine, answers, counted)
        if any(answer.verifications for answer in answers):
            own = sum((answer.acceptance for answer in answers), AcceptanceCounters())
            assert (own.rounds, own.accepted) == (counted.rounds, counted.accepted)
        positions = list(counted.accepted_per_position)
        assert 0 < counted.rounds < counted.drafted
        assert counted.accepted == sum(positions) <= counted.drafted
        assert positions == sorted(positions, reverse=True)
        assert max(positions) <= counted.rounds
        engine.load_draft(draft_folder)
        assert engine.acceptance().rounds == 0

    def test_e5_each_verification_yields_a_token_more_than_it_accepted(
        self, engine: Engine, draft_folder: Path
    ) -> None:
        """E5: rounds plus accepted guesses equal the tokens after the first; more if a round is cut off."""
        engine.load_draft(draft_folder)
        for prompt in _prompts(engine):
            before = engine.acceptance()
            (answer,) = engine.generate([prompt], SPECULATING)
            counted = engine.acceptance() - before
            behind = len(answer.token_ids) - 1
            assert behind <= counted.rounds + counted.accepted <= behind + SPECULATING.num_draft_tokens

    def test_e6_closed_engine_is_not_healthy(self, engine: Engine) -> None:
        """E6: ``health`` raises only after the engine was closed; ``close`` is idempotent."""
        engine.health()
        engine.close()
        engine.close()
        with pytest.raises(EngineError):
            engine.health()

    def test_e7_without_a_way_to_a_trainer_an_engine_generates(
        self,
        engine: Engine,
        new_engine: Callable[[EngineContext], Engine],
        context: EngineContext,
        schema: FeatureSchema,
    ) -> None:
        """E7: an engine without transport and placement gives the same answers; its ``capture`` fails."""
        prompts = _prompts(engine)
        with new_engine(replace(context, placement=None, transport=None)) as other:
            assert _tokens(other.generate(prompts, GREEDY)) == _tokens(engine.generate(prompts, GREEDY))
            with pytest.raises(EngineError):
                other.start(schema)
            assert isinstance(
                other.capture(requests_to(other, ["x"]), schema).exception(LIMIT_S), EngineError
            )

    def test_e8_draft_that_is_accepted_is_loaded(self, engine: Engine, draft_folder: Path) -> None:
        """E8: the engine can decode with a draft that ``check_draft`` accepts."""
        draft = recognise(draft_folder, engine.target)
        engine.check_draft(engine.config, engine.target, draft, draft_folder, 2)
        engine.load_draft(draft_folder)
        engine.generate(_prompts(engine), SPECULATING)
        assert engine.acceptance().rounds > 0

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

    def test_e14_what_is_not_declared_is_refused(self, engine: Engine) -> None:
        """E14: methods of abilities that are not declared raise EngineError, with a draft or without."""
        assert engine.abilities.in_process or self.placement != "inline"
        if not engine.abilities.proposers:
            with pytest.raises(EngineError, match=engine.name):
                engine.use_proposer(FirstToken)
        if not engine.abilities.fresh_weights:
            with pytest.raises(EngineError, match=engine.name):
                engine.draft_replica()

    def test_e14_declared_proposers_speculate(self, engine: Engine, reference: ReferenceTarget) -> None:
        """E14: with a proposer whose guesses are poor, answers equal plain decoding."""
        if not engine.abilities.proposers:
            pytest.skip("the engine does not declare the ability 'proposers'")
        engine.use_proposer(FirstToken)
        prompt = _prompts(engine)[0]
        (answer,) = engine.generate([prompt], SPECULATING)
        assert list(answer.token_ids) == greedy_answer(reference, prompt, SPECULATING.max_new_tokens)
        assert engine.acceptance().rounds > 0

    def test_e14_declared_fresh_weights_are_taken(self, engine: Engine, draft_folder: Path) -> None:
        """E10, E14: an engine that has loaded a draft returns a DraftReplica."""
        if not engine.abilities.fresh_weights:
            pytest.skip("the engine does not declare the ability 'fresh_weights'")
        engine.load_draft(draft_folder)
        assert isinstance(engine.draft_replica(), DraftReplica)

    def test_e17_frozen_products_are_the_targets(
        self, engine: Engine, schema: FeatureSchema, tmp_path: Path
    ) -> None:
        """E17: the products are those of the target's folder, and not those of another embedding or head."""
        engine.start(schema)
        assert_frozen_products(engine, tmp_path)

    @pytest.mark.parametrize("num_draft_tokens", [0, 3])
    def test_e18_end_token_is_the_last_of_an_answer(
        self, engine: Engine, request: pytest.FixtureRequest, num_draft_tokens: int
    ) -> None:
        """E18: an answer ends with its first end token, with a draft and without one."""
        if num_draft_tokens:
            engine.load_draft(request.getfixturevalue("draft_folder"))
        assert_ends_at_end_tokens(engine, num_draft_tokens)

    @pytest.mark.parametrize("concurrency", [1, 3])
    def test_e19_requests_are_taken_as_answers_end(
        self, engine: Engine, reference: ReferenceTarget, concurrency: int
    ) -> None:
        """E13, E19: requests may depend on answers; few are taken ahead, and dropped if the iterator is closed."""
        assert_takes_requests_as_answers_end(engine, reference, concurrency)

    def test_e20_requests_without_a_seed_get_different_answers(self, engine: Engine) -> None:
        """E20: the engine draws random numbers of its own."""
        assert_samples_without_seeds(engine)


def _prompts(engine: Engine) -> list[list[int]]:
    return token_rows(engine, (4, 9, 2))


def _tokens(answers: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]
