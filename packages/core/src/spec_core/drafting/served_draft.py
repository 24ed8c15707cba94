"""A served draft's folder, config.json and model.safetensors: read with every check, and written.

Reading needs no torch until tensors are loaded. Whatever is wrong with a folder is one ArtifactError of one line.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from spec_core.errors import ArtifactError, ConfigError
from spec_core.foreign import check_regular, foreign_errors, read_json_object
from spec_core.wording import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from spec_core.config import DraftConfig
    from spec_core.draft import Draft
    from spec_core.target import TargetSpec

D = TypeVar("D", bound="DraftConfig")
A = TypeVar("A", bound="Artifact")

Json = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

_FILE = "model.safetensors"
_SERVED_DTYPES = ("float32", "bfloat16", "float16")
_STORED_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}
"""By a tensor's name, safetensors' dtypes. Every other tensor is one of ``_STORED_FLOATS``."""
_STORED_FLOATS = ("F32", "BF16", "F16")


class Artifact(Protocol):
    """A published draft, opened."""

    @property
    def shape(self) -> object:
        """What the draft has decided, under the names of the options."""
        ...


@dataclass(frozen=True)
class ConfigReader:
    """Reads fields of a config.json; null counts as absent."""

    fields: Json
    folder: Path

    def has(self, key: str) -> bool:
        return self.fields.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.fields.get(key)
        return self._integer(key, default if value is None else value, 1, "a positive integer")

    def number(self, key: str) -> int:
        """An integer from 0 on."""
        return self._integer(key, self.fields.get(key), 0, "an integer from 0 on")

    def ids(self, key: str) -> tuple[int, ...] | None:
        """A list of integers, or None where it is absent or empty."""
        value: Any = self.fields.get(key)
        if not value:
            return None
        if not isinstance(value, list):
            raise self.error(f"{key}={shown(value)}, expected a list of integers")
        return tuple(self._integer(key, entry, 0, "integers from 0 on") for entry in value)

    def positive(self, key: str, default: float) -> float:
        value = self.fields.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(f"{key}={shown(value)}, expected a positive number")
        return value

    def section(self, key: str) -> Json:
        """A nested object; empty where it is absent."""
        value: Any = self.fields.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{key}={shown(value)}, expected an object")
        return value or {}

    def _integer(self, key: str, value: object, least: int, expected: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(f"{key}={shown(value)}, expected {expected}")
        return value

    def error(self, problem: str) -> ArtifactError:
        return ArtifactError(f"{self.folder / 'config.json'}: {problem}")


def read_config(folder: Path) -> Json | None:
    """The draft's config.json; None where there is none. Raises ArtifactError for one that is no JSON object."""
    file = folder / "config.json"
    return read_json_object(file, ArtifactError) if file.exists() else None


def architectures(fields: Json) -> set[str]:
    """What ``architectures`` of a config.json names; nothing where it is no list of names."""
    named: Any = fields.get("architectures")
    return {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()


def published(
    config: D, open_folder: Callable[[Path], A | None], decided: Iterable[str], algorithm: str
) -> tuple[D, A | None]:
    """``config`` with the options written out that the draft in its ``init_from`` has ``decided``: it alone makes a
    draft of that shape; and that draft, None where no folder is named. Raises ArtifactError if the folder is not the
    algorithm's, ConfigError if an option contradicts it."""
    if config.init_from is None:
        return config, None
    artifact = open_folder(config.init_from)
    if artifact is None:
        raise _not_a_draft(config.init_from, algorithm)
    found = {key: getattr(artifact.shape, key) for key in decided}
    for key, value in found.items():
        wanted = getattr(config, key)
        if wanted is not None and wanted != value:
            raise ConfigError(
                f"draft.{key}={wanted!r} contradicts draft.init_from={config.init_from}, whose value is {value!r}"
            )
    written = {key: value for key, value in found.items() if value is not None}
    return config.model_copy(update=written), artifact


def _not_a_draft(folder: Path, algorithm: str) -> ArtifactError:
    what = "its config.json names none" if (folder / "config.json").is_file() else "it has no config.json"
    return ArtifactError(f"draft.init_from={folder} is not {algorithm} draft: {what}")


def head_problem(target: TargetSpec) -> str | None:
    """Why engines cannot serve a draft of this target, or None: a draft's head is rows behind an RMS norm."""
    if target.norm == "layer":
        return "its final norm is a layer norm, an RMS norm is needed"
    if target.logit_softcap is not None:
        return f"its head is soft-capped ({target.logit_softcap}), a linear head is needed"
    if target.head_bias_name is not None:
        return f"its head has a bias ({target.head_bias_name}), a head without one is needed"
    return None


def read_shapes(folder: Path) -> Shapes:
    """Shape of every tensor; ArtifactError where the file is not complete, or a tensor's dtype is none that engines
    load (quantised weights have another, and further tensors besides)."""
    from safetensors import safe_open

    file = folder / _FILE
    check_regular(file, ArtifactError)
    shapes: Shapes = {}
    with (
        foreign_errors(ArtifactError, f"draft tensors {file} are no complete safetensors file"),
        safe_open(file, framework="np") as tensors,
    ):
        for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
            stored = tensors.get_slice(name)
            allowed = _STORED_DTYPES.get(name.rpartition(".")[2], _STORED_FLOATS)
            if stored.get_dtype() not in allowed:
                raise ArtifactError(
                    f"draft {folder}: {_FILE}: {name} has dtype {stored.get_dtype()}, expected {' or '.join(allowed)}"
                )
            shapes[name] = tuple(stored.get_shape())
    return shapes


def check_shapes(folder: Path, found: Shapes, required: Shapes, optional: Shapes | None = None) -> None:
    """Every tensor accounted for: ArtifactError for one that is missing, unknown, or of another shape."""
    where, allowed = f"draft {folder}: {_FILE}", required | (optional or {})
    if missing := sorted(required.keys() - found.keys()):
        raise ArtifactError(f"{where} lacks {', '.join(missing)}")
    if extra := sorted(found.keys() - allowed.keys()):
        raise ArtifactError(f"{where} has unknown tensors {', '.join(extra)}")
    for name, size in found.items():
        if size != allowed[name]:
            raise ArtifactError(
                f"{where}: {name} has shape {list(size)}, config.json says {list(allowed[name])}"
            )


def check_embedding(folder: Path, stored_name: str, target: TargetSpec, scale: float = 1.0) -> None:
    """ArtifactError if the draft's own copy of the embedding is not ``scale`` times the target's: SGLang, and our
    training, use the target's in any case. Some rows are compared, to the precision of bfloat16."""
    import torch

    from spec_core.targets.target_reader import read_target_tensors

    wanted_VH = read_target_tensors(target).embedding_VH
    found_VH = load_tensors(folder, {"embedding": stored_name})["embedding"]
    rows = torch.arange(0, len(wanted_VH), max(1, len(wanted_VH) // 256))
    same = found_VH.shape == wanted_VH.shape and torch.allclose(
        found_VH[rows].float(), scale * wanted_VH[rows].float(), rtol=2**-8, atol=1e-6
    )
    if not same:
        raise ArtifactError(
            f"draft {folder}: its {stored_name} is not the embedding of target {target.folder}: it was made for "
            "another target, or trained its own, which SGLang does not load"
        )


def load_tensors(folder: Path, stored_names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors as stored; ``stored_names``: name in the result -> name in the file."""
    from safetensors import safe_open

    path = folder / _FILE
    check_regular(path, ArtifactError)
    with (
        foreign_errors(ArtifactError, f"draft tensors {path} cannot be read"),
        safe_open(path, framework="pt") as file,
    ):
        return {name: file.get_tensor(stored) for name, stored in stored_names.items()}


def served_dtype(target: TargetSpec) -> str:
    """The target's, which a draft is served in; bfloat16 where that is a quantised one."""
    return target.dtype if target.dtype in _SERVED_DTYPES else "bfloat16"


def end_tokens(target: TargetSpec) -> Json:
    """``eos_token_id`` as configurations have it: a number, a list, or absent."""
    ends = list(target.eos_token_ids)
    return {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}


def as_served(tensor: Tensor, dtype: str) -> Tensor:
    """Return a floating tensor in ``dtype``, any other as it is, on the CPU."""
    import torch

    tensor = tensor.detach().cpu()
    return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def write_draft(draft: Draft, weights: Mapping[str, Tensor], target: TargetSpec, folder: Path) -> None:
    """Write what ``draft`` exports into ``folder``, which exists: config.json and model.safetensors."""
    from safetensors.torch import save_file

    # A copy of its own: safetensors refuses tensors that share memory.
    exported = draft.exported_tensors(weights, target)
    stored = {name: tensor.clone().contiguous() for name, tensor in exported}
    save_file(stored, folder / _FILE, metadata={"format": "pt"})
    config = json.dumps(draft.exported_config(target), indent=2) + "\n"
    (folder / "config.json").write_text(config, encoding="utf-8")
