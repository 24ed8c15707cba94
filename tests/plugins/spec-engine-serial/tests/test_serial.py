"""The engine keeps the contracts of engines and of those that speculate: some fixtures and two subclasses say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from spec_engine_serial.engine import SerialConfig, SerialEngine

from spec_core.errors import ConfigError
from spec_kit.drafting import recognise
from spec_kit.targets import read_target
from spec_kit.weight_sync import tensors_digest
from spec_testing import DraftReplicaSuite, EngineSuite, TransformersTarget, draw_draft

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spec_core import Engine, EngineContext


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=128,
        eos_token_id=2,
        initializer_range=0.25,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class TestSerialEngine(EngineSuite):
    @pytest.fixture
    def new_engine(self, folder: Path) -> Callable[[EngineContext], Engine]:
        return lambda context: SerialEngine.create(SerialConfig(), read_target(folder), context)

    @pytest.fixture
    def reference(self, folder: Path) -> TransformersTarget:
        return TransformersTarget(folder)

    @pytest.fixture
    def draft_folder(self, folder: Path, tmp_path: Path) -> Path:
        return draw_draft(tmp_path / "draft", read_target(folder), seed=0)


class TestSerialEngineIsUpdated(DraftReplicaSuite):
    @pytest.fixture
    def new_engine(self, folder: Path) -> Callable[[EngineContext], Engine]:
        return lambda context: SerialEngine.create(SerialConfig(), read_target(folder), context)

    @pytest.fixture
    def export(self, folder: Path, tmp_path: Path) -> Callable[[int], Path]:
        return lambda version: draw_draft(tmp_path / str(version), read_target(folder), seed=version)

    @pytest.fixture
    def target_state(self) -> Callable[[Engine], str]:
        return lambda engine: tensors_digest(engine._model.model.state_dict().items())


def test_more_guesses_than_the_option_allows_are_refused(folder, tmp_path):
    target = read_target(folder)
    draft_folder = draw_draft(tmp_path / "draft", target, seed=0)
    draft = recognise(draft_folder, target)
    with pytest.raises(
        ConfigError, match=r"is to propose 3 tokens a round, engine\.most_guesses=2; raise it"
    ):
        SerialEngine.check_draft(SerialConfig(most_guesses=2), target, draft, draft_folder, 3)
