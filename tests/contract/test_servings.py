"""The programs of engines keep the contract of spec_core.serving, also where none of them is installed."""

from pathlib import Path

import pytest

from spec_core import Serving, TargetSpec
from spec_engine_sglang.serving import SglangServing
from spec_engine_vllm.serving import VllmServing
from spec_kit.targets import read_target
from spec_testing import ServingSuite, draw_draft


class OfATinyLlama(ServingSuite):
    @pytest.fixture
    def target(self, tiny_llama: Path) -> TargetSpec:
        return read_target(tiny_llama)

    @pytest.fixture
    def draft_folder(self, target: TargetSpec, tmp_path: Path) -> Path:
        return draw_draft(tmp_path / "draft", target, seed=0)


class TestVllmServing(OfATinyLlama):
    @pytest.fixture
    def serving(self) -> Serving:
        return VllmServing()


class TestSglangServing(OfATinyLlama):
    @pytest.fixture
    def serving(self) -> Serving:
        return SglangServing()
