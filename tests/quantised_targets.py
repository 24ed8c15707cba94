"""Targets with quantised weights, and references of what engines compute with them."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
LARGEST_INT8 = 127.0


def modelopt_target(target: Path, folder: Path, algorithm: str) -> Path:
    """Write ``target`` as NVIDIA's ModelOpt does: FP8 or NVFP4, which hf_quant_config.json alone names."""
    shutil.copytree(target, folder)
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored |= (
            _modelopt_tensors(name, weight, algorithm) if name.endswith("_proj.weight") else {name: weight}
        )
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    named = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": named}))
    return folder


def _modelopt_tensors(name: str, weight: Tensor, algorithm: str) -> dict[str, Tensor]:
    if algorithm == "FP8":
        scale = weight.float().abs().max() / LARGEST_FP8
        return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    rows, columns = weight.shape
    packed = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    return {name: packed, f"{name}_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)}


def write_dequantised(quantised: Path, folder: Path) -> Path:
    """Write a quantised target with its matrices in float32: each integer or 8-bit float times its row's scale."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in quantised.iterdir():
        if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            shutil.copy(file, folder)
    weights = {
        name: weight for file in quantised.glob("*.safetensors") for name, weight in load_file(file).items()
    }
    save_file(
        {name: _dequantised(name, weights) for name in weights if not name.endswith("_scale")},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def _dequantised(name: str, weights: dict[str, Tensor]) -> Tensor:
    scale_R1 = weights.get(f"{name}_scale")
    return weights[name] if scale_R1 is None else weights[name].float() * scale_R1.float()


def round_inputs(model: nn.Module, *, to_integers: bool) -> None:
    """Round what enters a model's projections as kernels of W8A8 do, with a scale for each token."""
    rounded = rounded_to_int8 if to_integers else rounded_to_fp8
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, args: (rounded(args[0]), *args[1:]))


def rounded_to_fp8(states: Tensor) -> Tensor:
    """Return the states as 8-bit floats with the largest one of each token at the end of their range."""
    scale = states.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST_FP8
    return ((states / scale).to(torch.float8_e4m3fn).float() * scale).to(states.dtype)


def rounded_to_int8(states: Tensor) -> Tensor:
    """Return the states as integers of 8 bits with the largest one of each token at the end of their range."""
    scale = states.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST_INT8
    return ((states / scale).round() * scale).to(states.dtype)


def distance(got_TNH: Tensor, reference_TNH: Tensor) -> float:
    """Return the distance of two samples' states in units of the reference's norm."""
    return float((got_TNH - reference_TNH).norm() / reference_TNH.norm())
