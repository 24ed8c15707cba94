"""The engine keeps the contract of engines: two fixtures and a subclass say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from spec_engine_remote.engine import RemoteConfig, RemoteEngine

from spec_kit.targets import read_target
from spec_testing import EngineSuite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spec_core import Engine, EngineContext


class Reference:
    """The target as Transformers runs it, without hooks of the engine's."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        final = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: final.append(args[0]))
        output = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
        hook.remove()
        return torch.stack([*output.hidden_states[:-1], final[0]], dim=2)[0]

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([list(token_ids)])).logits[0]


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
    def reference(self, folder: Path) -> Reference:
        return Reference(folder)
