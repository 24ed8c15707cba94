"""Read and check the files of a served draft, config.json and model.safetensors, and write them.

Reading needs no torch until tensors are loaded. Every problem of a folder raises an ArtifactError of one line.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import pydantic

from spec_core import foreign_errors, read_json_object
from spec_core.errors import ArtifactError
from spec_core.foreign import check_regular
from spec_core.plugin_faults import checked_answer
from spec_core.wording import shown
from spec_kit.drafting.quantised_draft import (
    CONFIG,
    QUANTISATION,
    SCALE,
    TENSORS,
    quantisation,
    restored,
    settings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from spec_core import Draft, TargetSpec

Json = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
"""Name of a tensor -> its shape."""
Size = Annotated[int, pydantic.Field(ge=1)]
"""A positive integer."""

DOWNLOAD_FIRST = "a draft of the hub has to be downloaded first (hf download OWNER/NAME --local-dir FOLDER)"
_OTHER_WEIGHTS = {
    "pytorch_model.bin": "a pickle can run code; save its tensors by safetensors.torch.save_file",
    "model.safetensors.index.json": "write the tensors of its files into one",
}
_SERVED_DTYPES = ("float32", "bfloat16", "float16")
_STORED_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}
"""Allowed safetensors dtypes by tensor name; every other tensor must have one of ``_STORED_FLOATS``."""
_STORED_FLOATS = ("F32", "BF16", "F16")


def read_config(folder: Path) -> Json | None:
    """Return the fields of the draft's config.json, or None if the file does not exist.

    Raises ArtifactError for a file that holds no JSON object.
    """
    file = folder / CONFIG
    return read_json_object(file, ArtifactError) if file.exists() else None


def architectures(fields: Json) -> set[str]:
    """Return the names in ``architectures`` of a config.json; an empty set if it is no list."""
    named: Any = fields.get("architectures")
    return {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()


def parallel_mask_token(fields: Json) -> object:
    """Return the mask token id of a draft that guesses a chain in one pass, or None.

    It is read from the fields in which vLLM looks for it. Drafts that guess a chain token by token, such as Eagle3,
    have none. Nothing else distinguishes the two kinds of folders.
    """
    nested: Any = fields.get("dflash_config")
    places = (
        nested.get("mask_token_id") if isinstance(nested, dict) else None,
        fields.get("pard_token"),
        fields.get("ptd_token_id"),
    )
    return next((token for token in places if token is not None), None)


def checked(kind: Any, value: object, folder: Path, key: str = "") -> Any:
    """Return a value of config.json, validated as ``kind``, which is any type that pydantic knows.

    ``key``: key of the value in config.json. If the value is invalid, raise an ArtifactError that names file, key,
    value and what is expected.
    """
    try:
        return pydantic.TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = ".".join(map(str, filter(None, (key, *problem["loc"]))))
        expected = problem["msg"].replace("Input should be", "expected", 1)
        raise config_error(folder, f"{path}={shown(problem['input'])}, {expected}") from None


def section(fields: Json, key: str, folder: Path) -> Json:
    """Return the non-null fields of the object ``key`` in config.json; an empty dict if it is absent."""
    value = fields.get(key)
    return {} if value is None else present(checked(Json, value, folder, key))


def present(fields: Json) -> Json:
    """Return the fields that are not null. In a config.json, null means the same as an absent field."""
    return {key: value for key, value in fields.items() if value is not None}


def config_error(folder: Path, problem: str) -> ArtifactError:
    """Return the error for a config.json with this problem."""
    return ArtifactError(f"{folder / CONFIG}: {problem}")


def read_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor of the draft, without reading tensor data.

    Scales of quantised matrices are left out. Raises ArtifactError if the file is incomplete, or if engines cannot
    load a tensor's dtype, or would take it for another one.
    """
    from safetensors import safe_open

    file = folder / TENSORS
    for other, remedy in _OTHER_WEIGHTS.items():
        if not file.exists() and (folder / other).exists():
            raise ArtifactError(f"draft {folder} has {other} in place of {TENSORS}: {remedy}")
    check_regular(file, ArtifactError)
    fields = read_config(folder) or {}
    shapes = Shapes()
    form = quantisation(fields, folder)
    with (
        foreign_errors(
            ArtifactError,
            f"draft tensors {file} are no complete safetensors file (download or export them anew)",
        ),
        safe_open(file, framework="np") as tensors,
    ):
        names = set(tensors.keys())
        scales = {name + SCALE for name in names} & names if form is not None else set[str]()
        for name in sorted(names - scales):
            stored = tensors.get_slice(name)
            allowed = _STORED_DTYPES.get(name.rpartition(".")[2], _STORED_FLOATS)
            if form is not None and name + SCALE in scales:
                allowed = (form.stored,)
                found = tensors.get_slice(name + SCALE).get_shape()
                wanted = [stored.get_shape()[0], 1]
                if found != wanted:
                    raise ArtifactError(
                        f"draft {folder}: {name + SCALE} has shape {found}, expected {wanted}"
                    )
            if stored.get_dtype() not in allowed:
                raise ArtifactError(
                    f"draft {folder}: {TENSORS}: {name} has dtype {stored.get_dtype()}, expected "
                    f"{' or '.join(allowed)}"
                )
            shapes[name] = tuple(stored.get_shape())
    matrices = [scale.removesuffix(SCALE) for scale in scales]
    if form is not None and fields[QUANTISATION] != settings(form, matrices, shapes):
        raise config_error(
            folder,
            f"{QUANTISATION} is not what spec-trainer export --dtype writes for these tensors, so engines may take "
            "numbers of 8 bits for weights; take the draft's original folder",
        )
    return shapes


def check_shapes(folder: Path, found: Shapes, required: Shapes, optional: Shapes) -> None:
    """Raise ArtifactError for a missing or unknown tensor, or a shape that contradicts config.json."""
    where = f"draft {folder}: {TENSORS}"
    allowed = required | optional
    if missing := sorted(required.keys() - found.keys()):
        raise ArtifactError(f"{where} lacks {', '.join(missing)}")
    if extra := sorted(found.keys() - allowed.keys()):
        raise ArtifactError(f"{where} has unknown tensors {', '.join(extra)}")
    for name, size in found.items():
        if size != allowed[name]:
            raise ArtifactError(
                f"{where}: {name} has shape {list(size)}, config.json says {list(allowed[name])}"
            )


def load_tensors(folder: Path, stored_names: Mapping[str, str]) -> dict[str, Tensor]:
    """Load tensors in the file's dtypes, but quantised ones in float32.

    ``stored_names``: name in the result -> name in the file.
    """
    from safetensors import safe_open

    path = folder / TENSORS
    check_regular(path, ArtifactError)
    with (
        foreign_errors(ArtifactError, f"draft tensors {path} cannot be read"),
        safe_open(path, framework="pt") as file,
    ):
        tensors = {name: file.get_tensor(stored) for name, stored in stored_names.items()}
        scales = {name: f"{stored}{SCALE}" for name, stored in stored_names.items()}
        scaled = {name: scale for name, scale in scales.items() if scale in file.keys()}  # noqa: SIM118
        return tensors | {name: restored(tensors[name], file.get_tensor(scaled[name])) for name in scaled}


def check_finite(folder: Path) -> None:
    """Raise ArtifactError if a tensor of the draft holds NaN or infinity, which engines would not report."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        check_regular(path, ArtifactError)
        with (
            foreign_errors(ArtifactError, f"draft tensors {path} cannot be read"),
            safe_open(path, framework="pt") as file,
        ):
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                _check_finite(name, file.get_tensor(name), f"draft {folder}")


def _check_finite(name: str, tensor: Tensor, where: str) -> None:
    import torch

    if not torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all():
        raise ArtifactError(
            f"{where}: {name} holds values that are not finite (NaN or infinity): its training diverged or its file "
            "was damaged; use an earlier checkpoint"
        )


def served_dtype(target: TargetSpec) -> str:
    """Return the dtype in which a draft is served: the target's, or bfloat16 if the target is quantised."""
    return target.dtype if target.dtype in _SERVED_DTYPES else "bfloat16"


def as_served(tensor: Tensor, target: TargetSpec) -> Tensor:
    """Return a floating-point tensor in the dtype in which it is served, and any other tensor unchanged."""
    import torch

    tensor = tensor.detach()
    return tensor.to(getattr(torch, served_dtype(target))) if tensor.is_floating_point() else tensor


def exported_config(draft: Draft, target: TargetSpec) -> Json:
    """Return what ``draft`` writes into config.json. Raise PluginInvalid if the plugin returns something else."""
    return checked_answer(draft.exported_config(target), dict, draft, "exported_config")


def write_draft(draft: Draft, weights: Mapping[str, Tensor], target: TargetSpec, folder: Path) -> None:
    """Export ``draft``: write config.json and model.safetensors into the existing ``folder``.

    Raise ArtifactError if a tensor has a value that is not finite in the dtype in which it is served.
    """
    from safetensors.torch import save_file

    # Each tensor is cloned, because safetensors refuses tensors that share memory.
    exported = draft.exported_tensors(weights, target)
    stored = {name: tensor.cpu().clone().contiguous() for name, tensor in exported}
    for name, tensor in stored.items():
        _check_finite(name, tensor, f"the {draft.name} draft")
    save_file(stored, folder / TENSORS, metadata={"format": "pt"})
    config = json.dumps(exported_config(draft, target), indent=2) + "\n"
    (folder / CONFIG).write_text(config, encoding="utf-8")
