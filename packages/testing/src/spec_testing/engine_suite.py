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

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spec_core import DraftReplica, Engine, EngineContext
from spec_core.errors import ArtifactError, EngineError
from spec_core.records import AcceptanceCounters, FeatureSchema, Generation, SamplingParams
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
from spec_testing.captured import requests_to
from spec_testing.engine_capture_suite import LIMIT_S, EngineCaptureSuite

GREEDY = SamplingParams(max_new_tokens=12, stop_at_eos=False)
SPECULATING = replace(GREEDY, num_draft_tokens=3)


class EngineSuite(EngineCaptureSuite):
    """Tests of an engine. A subclass defines fixtures ``new_engine``, ``reference``, ``draft_folder``.

    ``draft_folder`` is only needed by engines that can load a draft. The engine must compute in float32. For
    an engine that starts further processes, set ``placement`` to ``colocated``.
    """

    @pytest.fixture
    def draft_folder(self) -> Path:
        """Return the folder of an exported draft for the engine's target, which the engine can load."""
        pytest.skip("no draft_folder fixture: this engine is not tested with a draft")

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
