"""The engine keeps the contract of engines: two fixtures and a subclass say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from spec_engine_remote.engine import RemoteConfig, RemoteEngine

from spec_kit.targets import read_target
from spec_testing import EngineSuite, TransformersTarget

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spec_core import Engine, EngineContext


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    config = transformers.LlamaConfig(
        vocab_size=97,
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


class TestRemoteEngine(EngineSuite):
    placement = "colocated"

    @pytest.fixture
    def new_engine(self, folder: Path) -> Callable[[EngineContext], Engine]:
        return lambda context: RemoteEngine.create(RemoteConfig(), read_target(folder), context)

    @pytest.fixture
    def reference(self, folder: Path) -> TransformersTarget:
        return TransformersTarget(folder)
