"""An engine starts for a run only with the embedding and the head that the trainer reads."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.errors import TargetError
from spec_core.records import FeatureSchema
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.targets import read_target
from spec_trainer.training.wiring import start_engine


@pytest.fixture
def engine(tiny_llama):
    backend = CpuBackend(CpuBackend.Config())
    context = EngineContext(backend=backend, placement="inline", transport=backend.transport("inline"))
    with HfEngine.create(HfConfig(name="hf"), read_target(tiny_llama), context) as engine:
        yield engine


@pytest.fixture
def schema(engine):
    return FeatureSchema(layers=(2, 5), hidden_size=engine.target.hidden_size, dtype="float32")


def test_engine_with_the_weights_of_the_folder_starts(engine, schema):
    start_engine(engine, engine.target, schema)


@pytest.mark.parametrize(
    ("name", "what"), [("lm_head.weight", "head"), ("model.embed_tokens.weight", "embedding")]
)
def test_engine_with_other_weights_than_the_folder_is_refused(engine, schema, tmp_path, name, what):
    folder = shutil.copytree(engine.target.folder, tmp_path / "other")
    stored = load_file(folder / "model.safetensors")
    stored[name] = stored[name].flip(0).contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=rf"engine 'hf' has another {what} .* {name}") as caught:
        start_engine(engine, replace(engine.target, folder=folder), schema)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "change"), [("float32", 0.01), ("bfloat16", 0.1)])
def test_retrained_head_is_noticed_up_to_the_rounding_of_the_engine(engine, schema, tmp_path, dtype, change):
    folder = shutil.copytree(engine.target.folder, tmp_path / "other")
    stored = load_file(folder / "model.safetensors")
    head_VH = stored["lm_head.weight"]
    noise_VH = torch.randn(head_VH.shape, generator=torch.Generator().manual_seed(0)) * head_VH.std()
    stored["lm_head.weight"] = head_VH + change * noise_VH
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with (
        HfEngine.create(HfConfig(name="hf", dtype=dtype), engine.target, engine.context) as rounded,
        pytest.raises(TargetError, match="has another head"),
    ):
        start_engine(rounded, replace(engine.target, folder=folder), replace(schema, dtype=dtype))


def test_weights_rounded_to_the_engines_dtype_are_the_same(engine, schema, tiny_llama):
    half = HfEngine.create(HfConfig(name="hf", dtype="bfloat16"), engine.target, engine.context)
    with half:
        start_engine(half, engine.target, replace(schema, dtype="bfloat16"))


class WatchedEngine(HfEngine):
    """The engine hf, which notes how precisely its process multiplies when it is compared."""

    precisions: list[str]

    def frozen_products(self, token_ids, vector):
        self.precisions = [torch.get_float32_matmul_precision()]
        return super().frozen_products(token_ids, vector)


def test_weights_are_compared_in_float32_where_training_may_round_products(engine, schema):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with WatchedEngine.create(HfConfig(name="hf"), engine.target, engine.context) as watched:
            start_engine(watched, engine.target, schema)
        assert (watched.precisions, torch.get_float32_matmul_precision()) == (["highest"], "medium")
    finally:
        torch.set_float32_matmul_precision(before)
