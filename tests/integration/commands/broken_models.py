"""Saved models with a weight that is not finite."""

from pathlib import Path

from safetensors.torch import load_file, save_file


def with_nan(folder: Path) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel() * tensors[name].is_floating_point())
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
