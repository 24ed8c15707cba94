"""The hf engine keeps the contract of engines, against Transformers driven by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from spec_core.draft import Draft
from spec_core.drafting import write_draft
from spec_core.plugins import load
from spec_core.targets.target_reader import read_target, read_target_tensors
from spec_core.testing import EngineSuite
from spec_engine_hf.engine import HfConfig, HfEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spec_core import Engine, TargetSpec
    from spec_core.engine import EngineContext
    from spec_core.testing.engine_suite import ReferenceTarget


class Transformer:
    """A target as its own authors run it: all hidden states kept, no cache, no batch."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        final: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, args: final.append(args[0]))
        output = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
        hook.remove()
        # The last entry of hidden_states is already normed; the norm's own input takes its place.
        return torch.stack([*output.hidden_states[:-1], final[0]], dim=2)[0]

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([list(token_ids)])).logits[0]


class TestHfEngine(EngineSuite):
    @pytest.fixture(params=["tiny_llama", "tiny_qwen3"])
    def folder(self, request: pytest.FixtureRequest) -> Path:
        return request.getfixturevalue(request.param)

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
        return Transformer(folder)

    @pytest.fixture
    def draft_folder(self, target: TargetSpec, tmp_path: Path) -> Path:
        plugin = load(Draft, "eagle3")
        draft = plugin(plugin.Config.model_validate({"name": "eagle3"}))
        folder = tmp_path / "draft"
        folder.mkdir()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = draft.build(target, read_target_tensors(target), None)
        write_draft(draft, module.state_dict(), target, folder)
        return folder
