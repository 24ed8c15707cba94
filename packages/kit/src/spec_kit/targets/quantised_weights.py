"""Find out from a target's files whether its weights are quantised, and whether a file says how."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from spec_core import read_json_object
from spec_core.errors import TargetError
from spec_core.wording import shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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
    """Raise TargetError if weights are quantised and no file says how, or if a file says so and none is.

    Raise it, too, if one of the two files says it in another form than engines read.
    """
    settings = config.section(_SETTINGS)
    algorithm = _modelopt_algorithm(config.file.parent / _MODELOPT_FILE)
    name = quantised_weight(tensors)
    if name is None and not settings and algorithm is not None:
        raise TargetError(
            f"{config.file.parent / _MODELOPT_FILE} says that weights are quantised ({algorithm}), and none is; "
            "delete it if the weights are the original ones, or else take the complete folder of the target"
        )
    if name is not None and not settings and algorithm is None:
        raise TargetError(
            f"{tensors[name].file}: {name} ({tensors[name].dtype}) is of a quantised model, but neither {_SETTINGS} "
            f"of {config.file.name} nor {_MODELOPT_FILE} says how; take the complete folder of the target"
        )


def _modelopt_algorithm(file: Path) -> str | None:
    """Return the format of the weights that ModelOpt's file names; None without the file, or if it names none."""
    if not os.path.lexists(file):
        return None
    fields = read_json_object(file, TargetError)
    section: object = fields.get("quantization", fields)
    if not isinstance(section, dict):
        raise TargetError(f"{file}: quantization is {shown(section)}, expected an object")
    named: object = cast("dict[str, object]", section).get("quant_algo")
    if not isinstance(named, str | None):
        raise TargetError(f"{file}: quantization.quant_algo is {shown(named)}, expected a name or null")
    return named


def _is_quantised(name: str, stored: StoredTensor) -> bool:
    leaf = name.rpartition(".")[2]
    return (
        leaf.startswith("weight_scale")
        or leaf in _PACKED
        or (leaf == "weight" and stored.dtype not in _FLOATS)
    )
