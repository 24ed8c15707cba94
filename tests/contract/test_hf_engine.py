"""The hf engine keeps the contract of engines, against Transformers driven by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spec_core import Engine, EngineContext, TargetSpec
from spec_core.errors import EngineError
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.targets import read_target
from spec_kit.weight_sync import tensors_digest
from spec_testing import (
    DraftReplicaSuite,
    EngineImagesSuite,
    EngineSuite,
    ReferenceTarget,
    SampleWithImages,
    TransformersTarget,
    draw_draft,
)
from spec_testing.draft_replica_suite import LIMIT_S, PROMPTS

from ..image_requests import picture, samples_with_images


class TestHfEngine(EngineSuite):
    @pytest.fixture
    def folder(self, tiny_qwen3: Path) -> Path:
        return tiny_qwen3  # tests/integration/test_target_types.py compares the states of every type

    @pytest.fixture
    def target(self, folder: Path) -> TargetSpec:
        return read_target(folder)

    @pytest.fixture
    def new_engine(self, target: TargetSpec) -> Callable[[EngineContext], Engine]:
        # 64 tokens: a capture batch takes several forward passes.
        config = HfConfig(name="hf", batch_tokens=64)
        return lambda context: HfEngine.create(config, target, context)

    @pytest.fixture
    def reference(self, folder: Path) -> ReferenceTarget:
        return TransformersTarget(folder)

    @pytest.fixture
    def draft_folder(self, target: TargetSpec, tmp_path: Path) -> Path:
        return draw_draft(tmp_path / "draft", target, seed=0)


class TestHfEngineSees(EngineImagesSuite):
    @pytest.fixture
    def folder(self, seeing_target: Callable[[str], Path]) -> Path:
        return seeing_target("qwen3_vl")

    @pytest.fixture
    def new_engine(self, folder: Path) -> Callable[[EngineContext], Engine]:
        target = read_target(folder)
        return lambda context: HfEngine.create(HfConfig(name="hf", batch_tokens=256), target, context)

    @pytest.fixture
    def samples(self, folder: Path) -> list[SampleWithImages]:
        shown = [[], [picture((24, 24))], [picture((24, 24), seed=1)], [picture((33, 47)), picture((8, 90))]]
        return samples_with_images(folder, shown)


class TestHfEngineIsUpdated(DraftReplicaSuite):
    @pytest.fixture(params=["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
    def algorithm(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture
    def target(self, tiny_qwen3: Path) -> TargetSpec:
        return read_target(tiny_qwen3)

    @pytest.fixture
    def new_engine(self, target: TargetSpec) -> Callable[[EngineContext], Engine]:
        return lambda context: HfEngine.create(HfConfig(name="hf", dtype="float32"), target, context)

    @pytest.fixture
    def export(self, target: TargetSpec, tmp_path: Path, algorithm: str) -> Callable[[int], Path]:
        return lambda version: draw_draft(tmp_path / str(version), target, version, algorithm)

    @pytest.fixture
    def drafted(self) -> Callable[[Engine], object]:
        return guesses

    @pytest.fixture
    def target_state(self) -> Callable[[Engine], str]:
        return lambda engine: tensors_digest(engine._model.causal_lm.state_dict().items())

    @pytest.fixture
    def fail_next_swap(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], None]:
        def plant(engine: Engine) -> None:
            def swap() -> None:
                monkeypatch.undo()
                raise RuntimeError("planted")

            monkeypatch.setattr(engine._updates.slot, "swap", swap)

        return plant

    def test_draft_that_is_loaded_stays_whatever_its_predecessors_publisher_does(
        self, engine, replica, publisher, export
    ) -> None:
        weights = load_file(export(1) / "model.safetensors")
        assert publisher.publish(1, weights).result(LIMIT_S).committed
        update = replica.status().result(LIMIT_S).update
        assert update is not None
        engine.load_draft(export(2))
        loaded = guesses(engine)
        for call in (replica.revert, replica.commit):
            with pytest.raises(EngineError):
                call(update).result(LIMIT_S)
        assert replica.status().result(LIMIT_S).version is None
        assert guesses(engine) == loaded


def guesses(engine: Engine) -> list[tuple[int, ...]]:
    """Return what the served draft proposes after the suite's prompts, whether the target accepts it or not."""
    drafting, found = engine._decoder.drafting, []
    for prompt in PROMPTS:
        proposer = drafting.new_proposer()
        _, hidden_TNH = engine._model.session(drafting.layers).prefill([prompt])
        proposer.extend([*prompt[1:], 0], hidden_TNH[0])
        found.append(proposer.propose(5, 0.0, torch.Generator()).token_ids)
    return found
