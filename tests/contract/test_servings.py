"""The programs of engines keep the contract of spec_core.serving, also where none of them is installed."""

from pathlib import Path

import pytest

from spec_core import Serving, TargetSpec
from spec_engine_llamacpp.config import LlamacppConfig
from spec_engine_llamacpp.serving import LlamacppServing
from spec_engine_sglang.serving import SglangServing
from spec_engine_vllm.serving import VllmServing
from spec_kit.targets import read_target
from spec_testing import ServingSuite, draw_draft

from ..gguf_targets import write_target_gguf


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


class TestLlamacppServing(OfATinyLlama):
    @pytest.fixture
    def serving(self) -> Serving:
        return LlamacppServing()

    @pytest.fixture
    def draft_folder(self, target: TargetSpec, tmp_path: Path) -> Path:
        return draw_draft(tmp_path / "draft", target, 0, fc_norm=False, norm_output=False)

    @pytest.fixture
    def config(self, tiny_llama: Path, tmp_path: Path) -> LlamacppConfig:
        return LlamacppConfig(gguf=write_target_gguf(tiny_llama, tmp_path / "target.gguf"))


class TestSglangServing(OfATinyLlama):
    @pytest.fixture
    def serving(self) -> Serving:
        return SglangServing()
