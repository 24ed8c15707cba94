"""Targets that the installed Transformers cannot load are refused before anything starts."""

import json
import shutil
from importlib.metadata import version

import pytest
from tests.quantised_targets import modelopt_target

from spec_core.errors import TargetError
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.targets import read_target


@pytest.fixture
def target(tiny_llama, tmp_path):
    def make(**changes):
        folder = shutil.copytree(tiny_llama, tmp_path / "target")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return read_target(folder)

    return make


def test_target_without_quantised_weights_is_accepted(target):
    HfEngine.check_target(HfConfig(), target())


@pytest.mark.parametrize(
    "quantization",
    [
        pytest.param({"quant_method": "modelopt", "quant_algo": "NVFP4"}, id="unknown to Transformers"),
        pytest.param({"quant_method": "awq", "bits": 4, "group_size": 128}, id="its library is missing"),
        pytest.param({"quant_method": "fp8", "weight_block_size": 128}, id="malformed"),
        pytest.param({"bits": 4}, id="no method"),
        pytest.param({}, id="empty"),
    ],
)
def test_quantised_target_that_cannot_be_loaded_is_refused_in_one_line(target, quantization):
    described = target(quantization_config=quantization)
    with pytest.raises(TargetError) as caught:
        HfEngine.check_target(HfConfig(), described)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"target {described.folder} is quantised ({quantization.get('quant_method')})")
    advice = "mend this or choose another engine (engine.name): "
    assert f"transformers {version('transformers')} cannot load it; {advice}" in line


def test_compute_dtype_that_torch_does_not_have_is_refused(target):
    described = target(
        quantization_config={"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "os.system"}
    )
    with pytest.raises(TargetError, match="cannot load it"):
        HfEngine.check_target(HfConfig(), described)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_quantisation_that_only_modelopts_file_tells_is_refused(tiny_llama, tmp_path, algorithm):
    folder = modelopt_target(tiny_llama, tmp_path / "target", algorithm)
    described = read_target(folder)  # vLLM and SGLang can load it
    with pytest.raises(
        TargetError, match=r"is quantised \(model\S*_proj.weight\), .* no quantization_config"
    ) as caught:
        HfEngine.check_target(HfConfig(), described)
    assert "engine.name" in str(caught.value)


def test_modelopt_file_about_the_cache_alone_is_no_reason_to_refuse(target):
    described = target()
    (described.folder / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    HfEngine.check_target(HfConfig(), described)
