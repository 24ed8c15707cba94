"""``export --dtype``: the matrices of a draft's layers in 8 bits, and what reads such a folder."""

import json
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_trainer.cli.app import run

from ..quantised_targets import write_dequantised


@pytest.fixture(scope="module")
def trained(tiny_llama, rows_file, tmp_path_factory) -> Path:
    """A checkpoint of one step."""
    output = tmp_path_factory.mktemp("trained") / "run"
    words = ["--target", tiny_llama, "--data", rows_file, "--output", output, "train.steps=1"]
    assert run([str(word) for word in words]) == 0
    return output / "checkpoints" / "step-1"


@pytest.fixture(scope="module")
def prompts(rows_file, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "rows.jsonl"
    file.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:2]))
    return file


@pytest.fixture(scope="module", params=["int8", "fp8"])
def quantised(trained, prompts, tmp_path_factory, request) -> tuple[Path, str]:
    """The checkpoint's draft in 8 bits, and what the command printed."""
    folder = tmp_path_factory.mktemp(request.param)
    words = [
        "--checkpoint",
        trained,
        "--output",
        folder / "draft",
        "--dtype",
        request.param,
        "--prompts",
        prompts,
    ]
    with redirect_stdout(StringIO()) as printed:
        assert run(["export", *map(str, words)]) == 0
    return folder / "draft", printed.getvalue()


def test_matrices_of_layers_are_rounded_and_the_rest_is_as_it_was(quantised, trained):
    folder, _ = quantised
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "others may serve it"
    whole = write_dequantised(folder, folder.with_name("whole"))
    plain, stored, restored = (
        load_file(one / "model.safetensors") for one in (trained.parents[1] / "draft", folder, whole)
    )
    assert restored.keys() == plain.keys()
    rounded = {name for name in plain if f"{name}_scale" in stored}
    assert {name.rsplit(".", 2)[1] for name in rounded} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    for name, tensor in plain.items():
        if name not in rounded:
            assert torch.equal(stored[name], tensor)
            continue
        assert stored[name].dtype in (torch.int8, torch.float8_e4m3fn)
        scale_R1 = tensor.float().abs().amax(1, keepdim=True)
        # Half a unit of the integers, or half of the last of an 8-bit float's three bits.
        bound = (
            scale_R1 / 254
            if stored[name].dtype == torch.int8
            else tensor.float().abs() / 16 + scale_R1 / 2**10
        )
        assert ((restored[name] - tensor.float()).abs() <= 1.01 * bound).all()


def test_the_report_has_sizes_and_the_acceptance_length_before_and_after(
    quantised, prompts, tiny_llama, command_line
):
    folder, printed = quantised
    sizes = re.search(r"^size: ([\d.]+) MiB, ([\d.]+) MiB without --dtype=\w+$", printed, re.MULTILINE)
    lengths = re.search(
        r"^acceptance length in engine hf: ([\d.]+), ([\d.]+) without --dtype=\w+$", printed, re.MULTILINE
    )
    assert sizes
    assert float(sizes[1]) < float(sizes[2])
    assert lengths
    words = (
        "--target",
        tiny_llama,
        "--draft-model",
        folder,
        "--prompts",
        prompts,
        "--temperature",
        0,
        "--json",
    )
    measured = json.loads(command_line("evaluate", *words).out)
    assert float(lengths[1]) == pytest.approx(measured["acceptance_length"], abs=6e-4)
    assert f"acceptance length (tau): {measured['acceptance_length']:.2f} tokens a pass, measured" in printed
    assert f"## In 8 bits\n\n- {sizes[0]}\n- {lengths[0]}\n" in (folder / "README.md").read_text()


def test_without_prompts_no_acceptance_length_is_printed(command_line, trained, tmp_path):
    words = ("--checkpoint", trained, "--output", tmp_path / "draft", "--dtype", "int8")
    printed = command_line("export", *words).out
    assert "acceptance length: not measured in 8 bits" in printed
    assert "simulated" not in printed


def test_a_quantised_draft_is_converted_to_the_weights_that_it_has(
    quantised, tiny_llama, command_line, tmp_path, caplog
):
    folder, _ = quantised
    words = ("--draft-model", folder, "--target", tiny_llama, "--output", tmp_path / "plain")
    assert command_line("convert", *words).code == 0
    assert f"draft {folder} has matrices in 8 bits, and their rounded weights are written" in caplog.text
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    restored = load_file(write_dequantised(folder, tmp_path / "whole") / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert plain.keys() == restored.keys()
    assert all(torch.equal(plain[name], restored[name].to(plain[name].dtype)) for name in plain)


def test_servers_are_not_pushed_a_quantised_draft(quantised, tiny_llama, command_line):
    words = ("--target", tiny_llama, "--draft-model", quantised[0], "--to", "http://127.0.0.1:9")
    assert command_line("push", *words).error.endswith(
        "is quantised, and no server takes that; push the original"
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--dtype", "int4"], "--dtype=int4: expected int8 or fp8, or none for the target's dtype"),
        (["--dtype", "int8", "--format", "gguf"], "--dtype=int8 with --format=gguf: only the folder"),
        (
            ["--prompts", "p.jsonl"],
            "--prompts=p.jsonl without --dtype: they show what 8 bits change; add --dtype, or run",
        ),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(command_line, trained, tmp_path, words, problem):
    outcome = command_line("export", "--checkpoint", trained, "--output", tmp_path / "draft", *words)
    assert outcome.code == 2
    assert problem in outcome.error
    assert not list(tmp_path.iterdir())


def test_a_draft_that_no_engine_loads_in_8_bits_is_refused(command_line, trained, tmp_path, monkeypatch):
    words = ("export", "--checkpoint", trained, "--output", tmp_path / "draft", "--dtype", "int8")
    monkeypatch.setattr("spec_draft_eagle3.draft.Eagle3Draft.serving_methods", {"sglang": "EAGLE3"})
    assert "--dtype=int8: no engine loads it: draft" in (line := command_line(*words).error)
    assert "cannot be served by SGLang: its matrices are quantised" in line
    monkeypatch.setattr("spec_draft_eagle3.draft.Eagle3Draft.quantised_modules", ())
    assert command_line(*words).error.endswith("a draft 'eagle3' has no layers that engines load in 8 bits")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fields", "tensors", "problem"),
    [
        (
            {"quantization_config": {"quant_method": "gptq"}},
            {},
            "quantization_config={'quant_method': 'gptq'",
        ),
        ({"quantization_config": None}, {}, "down_proj.weight has dtype"),
        ({}, {"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}, "weight_scale has shape [1], expected"),
        ({}, {"midlayer.mlp.up_proj.weight": torch.ones(48, 4)}, "weight has dtype F32, expected"),
        (
            {},
            {"midlayer.mlp.up_proj.weight_zero_point": torch.ones(1)},
            "has unknown tensors midlayer.mlp.up_proj",
        ),
    ],
)
def test_a_folder_that_engines_would_read_otherwise_is_refused(
    quantised, tiny_llama, command_line, tmp_path, fields, tensors, problem
):
    folder = shutil.copytree(quantised[0], tmp_path / "draft")
    file, weights = folder / "config.json", folder / "model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    save_file(load_file(weights) | tensors, weights)
    words = ("--draft-model", folder, "--target", tiny_llama, "--output", tmp_path / "plain")
    assert problem in command_line("convert", *words).error


@pytest.mark.parametrize("key", ["config_groups", "ignore"])
def test_settings_of_other_matrices_are_refused(quantised, tiny_llama, command_line, tmp_path, key):
    """Engines would take the numbers of a matrix that they do not find there for its weights."""
    folder = shutil.copytree(quantised[0], tmp_path / "draft")
    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"][key]
    (folder / "config.json").write_text(json.dumps(fields))
    words = ("--draft-model", folder, "--target", tiny_llama, "--output", tmp_path / "plain")
    assert (
        "is not what spec-trainer export --dtype writes for these tensors"
        in command_line("convert", *words).error
    )
