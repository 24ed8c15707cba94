"""Find out from a target's files whether its weights are quantised, and whether a file says how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_core.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spec_kit.targets.safetensors_index import StoredTensor
    from spec_kit.targets.target_config import TargetConfig

_SETTINGS = "quantization_config"
_MODELOPT_FILE = "hf_quant_config.json"
"""NVIDIA's ModelOpt writes its settings here. vLLM and SGLang read this file, transformers does not."""
_FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
_PACKED = ("qweight", "weight_packed")


def quantised_weight(tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the first name of a quantised weight or of a weight's scale; None if there is none."""
    return next((name for name in sorted(tensors) if _is_quantised(name, tensors[name])), None)


def check_quantisation(config: TargetConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise TargetError if weights are quantised and no file says how, or config.json says it in another form."""
    if config.section(_SETTINGS) or (config.file.parent / _MODELOPT_FILE).is_file():
        return
    if (name := quantised_weight(tensors)) is not None:
        raise TargetError(
            f"{tensors[name].file}: {name} ({tensors[name].dtype}) is of a quantised model, but neither {_SETTINGS} "
            f"of {config.file.name} nor {_MODELOPT_FILE} says how; take the complete folder of the target"
        )


def _is_quantised(name: str, stored: StoredTensor) -> bool:
    leaf = name.rpartition(".")[2]
    return (
        leaf.startswith("weight_scale")
        or leaf in _PACKED
        or (leaf == "weight" and stored.dtype not in _FLOATS)
    )
