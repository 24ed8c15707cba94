"""Write the matrices of a draft's layers in 8 bits, and read them back.

The layout is that of the library compressed-tensors, which vLLM and SGLang read: a matrix has integers or 8-bit
floats and, as ``NAME_scale``, one float for each of its rows. Engines round what enters the matrix to 8 bits, too,
with one scale for each token. Importing this module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spec_core import read_json_object
from spec_core.errors import ArtifactError
from spec_core.wording import shown

if TYPE_CHECKING:
    from torch import Tensor

    from spec_kit.drafting.draft_files import Json

QUANTISATION = "quantization_config"
"""Field of config.json that says how weights are quantised."""
SCALE = "_scale"
"""Suffix of the name of a matrix's scales, after the name of the matrix."""
CONFIG, TENSORS = "config.json", "model.safetensors"
_LAYERS = ("layers.", "midlayer.")
_LEAST = 1e-30
"""Scale of a row of zeros, in units of the largest number."""
_FUSED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
"""A matrix -> the name of the module into which engines fuse it with others."""


class _Format(NamedTuple):
    stored: str
    """Safetensors' name of the dtype."""
    torch_name: str
    kind: str
    layout: str
    """compressed-tensors' name of the layout."""
    largest: float


QUANTISED_DTYPES = {
    "int8": _Format("I8", "int8", "int", "int-quantized", 127.0),
    "fp8": _Format("F8_E4M3", "float8_e4m3fn", "float", "float-quantized", 448.0),
}
"""Name of a dtype in which matrices are written -> how."""


def quantise_folder(folder: Path, modules: Collection[str], dtype: str) -> None:
    """Quantise the matrices of an exported draft's layers, in place.

    ``modules``: last names of their modules, such as ``o_proj``. ``dtype``: a key of ``QUANTISED_DTYPES``.
    """
    from safetensors.torch import load_file, save_file

    form = QUANTISED_DTYPES[dtype]
    plain = load_file(folder / TENSORS)
    matrices = [name for name in plain if name.startswith(_LAYERS) and _module(name) in modules]
    stored = dict(plain)
    for name in matrices:
        stored |= _quantised(name, plain[name], form)
    save_file(stored, folder / TENSORS, metadata={"format": "pt"})
    shapes = {name: tuple(tensor.shape) for name, tensor in plain.items()}
    fields = read_json_object(folder / CONFIG, ArtifactError) | {
        QUANTISATION: settings(form, matrices, shapes)
    }
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _quantised(name: str, matrix: Tensor, form: _Format) -> dict[str, Tensor]:
    import torch

    matrix_RC = matrix.float()
    scale_R1 = matrix_RC.abs().amax(1, keepdim=True).clamp(min=_LEAST) / form.largest
    units_RC = matrix_RC / scale_R1
    if form.kind == "int":
        units_RC = units_RC.round()
    units_RC = units_RC.clamp(-form.largest, form.largest)  # the division may round up
    return {name: units_RC.to(getattr(torch, form.torch_name)), name + SCALE: scale_R1}


def _module(name: str) -> str:
    """Return the last name of the module whose weight has this name; an empty string for any other tensor."""
    *_, module, leaf = ("", *name.split("."))
    return module if leaf == "weight" else ""


def settings(form: _Format, matrices: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> Json:
    """Return what config.json says of a folder in which exactly ``matrices`` are quantised.

    ``shapes``: name of each tensor but the scales -> its shape.
    """
    others = (_module(name) for name, shape in shapes.items() if len(shape) == 2 and name not in matrices)
    eight: Json = {"num_bits": 8, "type": form.kind, "symmetric": True}
    group = {
        "targets": [_pattern({_module(name) for name in matrices})],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form.layout,
        "config_groups": {"group_0": group},
        "ignore": [_pattern({"lm_head", *filter(None, others)})],
    }


def _pattern(modules: Collection[str]) -> str:
    """Return compressed-tensors' pattern of modules, under any prefix: engines number layers after the target's."""
    names = sorted({*modules, *(_FUSED[name] for name in modules if name in _FUSED)})
    return rf"re:(.*\.)?({'|'.join(names)})$"


def quantisation(fields: Json, folder: Path) -> _Format | None:
    """Return how config.json says that weights are quantised; None if they are not.

    Raise ArtifactError if they are quantised in another way than ``quantise_folder`` does it.
    """
    found: Any = fields.get(QUANTISATION)
    if found is None:
        return None
    named = {key: found.get(key) for key in ("quant_method", "format")} if isinstance(found, dict) else found
    for form in QUANTISED_DTYPES.values():
        if named == {"quant_method": "compressed-tensors", "format": form.layout}:
            return form
    layouts = ", ".join(form.layout for form in QUANTISED_DTYPES.values())
    raise ArtifactError(
        f"draft {folder}: config.json has {QUANTISATION}={shown(named)}; of quantised drafts only those of "
        f"compressed-tensors in 8 bits ({layouts}) are read: take the draft's original folder"
    )


def restored(matrix: Tensor, scale: Tensor) -> Tensor:
    """Return a quantised matrix in float32."""
    return matrix.float() * scale.float()
