"""Folders whose weights engines would read differently are refused."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.quantised_targets import modelopt_target

from spec_core.errors import TargetError
from spec_kit.targets import read_target, read_target_tensors


@pytest.fixture
def copied(tiny_llama, tmp_path):
    return shutil.copytree(tiny_llama, tmp_path / "target")


def refusal(folder):
    """The one line with which a folder is refused."""
    with pytest.raises(TargetError) as caught:
        read_target(folder)
    (line,) = str(caught.value).splitlines()
    return line


def with_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return folder


def with_weights(folder, **changed):
    """Replace tensors (dots as ``__``); None removes one."""
    weights = load_file(folder / "model.safetensors")
    weights |= {name.replace("__", "."): value for name, value in changed.items()}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_single_file_beside_an_index_of_other_files_is_refused(make_target, tiny_llama, tmp_path):
    folder = shutil.copytree(make_target("llama", shard_bytes=30_000), tmp_path / "target")
    shutil.copy(tiny_llama / "model.safetensors", folder)
    line = refusal(folder)
    assert "model.safetensors.index.json" in line
    assert "delete the one that is not the target" in line


def test_index_that_names_the_single_file_is_accepted(copied):
    names = load_file(copied / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_target(copied).num_layers == 8


def test_stored_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(copied):
    line = refusal(with_config(copied, tie_word_embeddings=True))
    assert "lm_head.weight is stored and differs from model.embed_tokens.weight" in line
    assert '"tie_word_embeddings": false' in line


def test_head_tied_by_the_default_of_its_model_type_is_refused_too(make_target, tmp_path):
    folder = shutil.copytree(make_target("gemma"), tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    own = torch.ones_like(load_file(folder / "model.safetensors")["model.embed_tokens.weight"])
    assert "differs from" in refusal(with_weights(folder, lm_head__weight=own))


def test_stored_head_that_equals_the_embedding_is_accepted(copied):
    embedding = load_file(copied / "model.safetensors")["model.embed_tokens.weight"]
    with_config(with_weights(copied, lm_head__weight=embedding.clone()), tie_word_embeddings=True)
    tensors = read_target_tensors(read_target(copied))
    assert torch.equal(tensors.head_VH, tensors.embedding_VH)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_quantised_weights_that_no_file_explains_are_refused(tiny_llama, tmp_path, algorithm):
    folder = modelopt_target(tiny_llama, tmp_path / "target", algorithm)
    assert read_target(folder).num_layers == 8
    (folder / "hf_quant_config.json").unlink()
    line = refusal(folder)
    assert "is of a quantised model" in line
    assert "hf_quant_config.json" in line


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"quantization": {"quant_algo": "FP8"}}', r"weights are quantised \(FP8\), and none is; delete it"),
        ('{"quanti', "hf_quant_config.json is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"quantization": null}', "quantization is None, expected an object"),
        ('{"quantization": {"quant_algo": 8}}', "quantization.quant_algo is 8, expected a name"),
    ],
)
def test_modelopts_file_that_does_not_fit_plain_weights_is_refused(copied, text, problem):
    (copied / "hf_quant_config.json").write_text(text)
    assert re.search(problem, refusal(copied))


def test_scale_beside_a_plain_weight_is_refused(copied):
    scale = {"model__layers__0__mlp__up_proj__weight_scale": torch.ones(1)}
    assert "model.layers.0.mlp.up_proj.weight_scale" in refusal(with_weights(copied, **scale))


@pytest.mark.parametrize("value", ["fp8", 8, ["fp8"]])
def test_quantisation_that_is_no_object_is_refused(copied, value):
    line = refusal(with_config(copied, quantization_config=value))
    assert "quantization_config=" in line
    assert line.endswith("expected an object")


def test_digest_notices_a_change_of_any_one_tensor(copied):
    """Also where tensors are so many, and a file so long, that few places of the file could miss one."""
    before, stored = read_target(copied).digest, load_file(copied / "model.safetensors")
    for name in stored:
        changed = stored | {name: stored[name] * 1.001 + 1e-4}
        save_file(changed, copied / "model.safetensors", metadata={"format": "pt"})
        assert read_target(copied).digest != before, name
    save_file(stored, copied / "model.safetensors", metadata={"format": "pt"})
    assert read_target(copied).digest == before


def test_digest_notices_a_changed_tensor_between_long_ones(copied):
    extra = {f"model.extra{number}.weight": torch.zeros(200_000) for number in range(40)}
    stored = load_file(copied / "model.safetensors") | extra
    save_file(stored, copied / "model.safetensors", metadata={"format": "pt"})
    before = read_target(copied).digest
    stored["model.layers.3.mlp.up_proj.weight"] += 1
    save_file(stored, copied / "model.safetensors", metadata={"format": "pt"})
    assert read_target(copied).digest != before


def test_another_file_with_the_same_tensors_beside_a_single_one_is_refused(copied):
    shutil.copy(copied / "model.safetensors", copied / "model_old.safetensors")
    assert (
        "holds two models, model.safetensors and model_old.safetensors, both with lm_head.weight"
        in refusal(copied)
    )
    save_file(
        {"tok_embeddings.weight": torch.zeros(1)}, copied / "model_old.safetensors"
    )  # of another program
    read_target(copied)
