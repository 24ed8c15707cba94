"""Write a target folder with random weights in the shape of a published model: speed does not depend on them.

python benchmarks/random_target.py qwen3-8b /dev/shm/qwen3-8b

With ``--fp8`` the layers' matrices are in 8-bit floating point with a scale per row. With ``--shallow`` the layers
change hidden states by next to nothing. So the most probable token is a fixed function of the token before, and long
answers of many prompts run into the same sequences: a draft can learn them, and prompt lookup finds few.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from spec_processes import collect_rarely

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHARD_BYTES = 4 << 30

SHAPES: dict[str, dict[str, object]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
    "llama-3-70b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    "small": {
        "model_type": "qwen3",
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "toy": {
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
}

_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FP8: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _ACTIVATIONS}
    },
}
"""The layout of published FP8 models: a scale per row of a weight, and one per token that the engine computes."""


SHALLOW = 1e-4
"""Factor of what the layers of a shallow target add to hidden states."""


def write_random_target(
    shape: str, folder: Path, dtype: str = "bfloat16", *, fp8: bool = False, shallow: bool = False
) -> Path:
    """Write config.json and sharded safetensors; leave a folder that is complete already as it is."""
    if (folder / "model.safetensors.index.json").exists():
        return folder
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    fields = dict(SHAPES[shape])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields, dtype=dtype)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    if fp8:
        model.config.quantization_config = FP8
    model.config.save_pretrained(folder)
    weights = {name: tensor.shape for name, tensor in model.state_dict().items()}
    _write_shards(weights, folder, getattr(torch, dtype), fp8=fp8, shallow=shallow)
    return folder


def _write_shards(
    shapes: dict[str, torch.Size], folder: Path, dtype: torch.dtype, *, fp8: bool, shallow: bool
) -> None:
    import torch
    from safetensors.torch import save_file

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, size in shapes.items():
        values = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        values = 1 + 0.02 * values if len(size) == 1 else 0.02 * values
        if shallow and name.endswith(("o_proj.weight", "down_proj.weight")):
            values *= SHALLOW
        if fp8 and name.endswith("_proj.weight"):
            scale_R1 = values.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            shard[f"{name}_scale"] = scale_R1.to(dtype).cpu()
            shard[name] = (values / scale_R1).to(torch.float8_e4m3fn).cpu()
        else:
            shard[name] = values.to(dtype).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    """Write the folder that the command line names."""
    collect_rarely()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--shallow", action="store_true")
    arguments = parser.parse_args()
    kind = {"fp8": arguments.fp8, "shallow": arguments.shallow}
    write_random_target(arguments.shape, arguments.folder, arguments.dtype, **kind)


if __name__ == "__main__":
    main()
