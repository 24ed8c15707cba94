"""A published Eagle3 draft: recognised, checked tensor by tensor, and read. Imports without torch."""

from __future__ import annotations

import json
import logging
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from spec_core.errors import ArtifactError
from spec_draft_eagle3.shape import DraftShape, Json

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_log = logging.getLogger(__name__)

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ARCHITECTURES = {ARCHITECTURE, "Eagle3LlamaForCausalLM"}
_EMBEDDING = "embed_tokens.weight"
_MAPPING = ("d2t", "t2d")


@dataclass(frozen=True)
class Artifact:
    """A folder whose config.json and tensor names, shapes and vocabulary mapping have been checked."""

    folder: Path
    shape: DraftShape
    stored_names: dict[str, str]
    """Name in the module -> name in the file."""

    @classmethod
    def open(cls, folder: Path) -> Self | None:
        """None if ``folder`` holds no Eagle3 draft; ArtifactError if it holds a damaged one."""
        fields = _read_config(folder)
        if fields is None or not _is_eagle3(fields):
            return None
        shape = DraftShape.from_json(fields, folder)
        header = _read_header(folder / "model.safetensors")
        names = {_canonical(name): name for name in header}
        if names.pop(_EMBEDDING, None):
            _log.info("%s: its own embed_tokens is ignored, the target's embedding is used", folder)
        _check_tensors(
            folder, shape, {name: tuple(header[stored]["shape"]) for name, stored in names.items()}
        )
        artifact = cls(folder, shape, names)
        if "d2t" in names:
            artifact._read_mapping()
        return artifact

    def read(self) -> dict[str, Tensor]:
        """The module's state dict: weights as float32, the vocabulary mapping as stored."""
        names = self.shape.tensor_shapes()
        weights = {name: tensor.float() for name, tensor in self._load(tuple(names)).items()}
        return weights | (self._read_mapping() if self.shape.reduced else {})

    def _read_mapping(self) -> dict[str, Tensor]:
        import torch

        from spec_draft_eagle3.vocabulary import mapping

        stored = self._load(tuple(name for name in _MAPPING if name in self.stored_names))
        ids_V = torch.arange(self.shape.vocab_size) + stored["d2t"].long()
        total = self.shape.target_vocab_size
        if ids_V.min() < 0 or ids_V.max() >= total or len(ids_V.unique()) < len(ids_V):
            raise ArtifactError(
                f"draft {self.folder}: d2t does not map its rows to different ids below {total}"
            )
        if not self.shape.reduced and stored["d2t"].any():
            raise ArtifactError(
                f"draft {self.folder}: d2t permutes a full vocabulary; it must be 0 or absent"
            )
        expected = mapping(ids_V, total)
        if "t2d" in stored and not torch.equal(stored["t2d"].bool(), expected["t2d"]):
            raise ArtifactError(f"draft {self.folder}: t2d and d2t do not describe the same vocabulary")
        return expected

    def _load(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        from safetensors import SafetensorError, safe_open

        path = self.folder / "model.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(self.stored_names[name]) for name in names}
        except SafetensorError as error:
            raise ArtifactError(f"draft tensors {path} cannot be read: {error}") from None


def _read_config(folder: Path) -> Json | None:
    file = folder / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file} cannot be read as JSON: {error}") from None
    return fields if isinstance(fields, dict) else None


def _is_eagle3(fields: Json) -> bool:
    """By architecture; EAGLE's own files say LlamaForCausalLM and are known by their draft vocabulary."""
    named = set(fields.get("architectures") or ())
    return bool(named & _ARCHITECTURES) or ("LlamaForCausalLM" in named and "draft_vocab_size" in fields)


def _read_header(file: Path) -> Json:
    """Names, dtypes and shapes: a safetensors file starts with 8 bytes of length and that much JSON."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size) if size <= file.stat().st_size else b"")
        header.pop("__metadata__", None)
        end = 8 + size + max(entry["data_offsets"][1] for entry in header.values())
    except OSError as error:
        raise ArtifactError(f"draft tensors {file} cannot be read: {error.strerror}") from None
    except (ValueError, struct.error, AttributeError, KeyError, TypeError):
        raise ArtifactError(f"draft tensors {file} are no safetensors file") from None
    if end != file.stat().st_size:
        raise ArtifactError(
            f"draft tensors {file} have {file.stat().st_size} bytes, expected {end}: not complete"
        )
    return header


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _check_tensors(folder: Path, shape: DraftShape, found: dict[str, tuple[int, ...]]) -> None:
    expected = shape.tensor_shapes()
    required = expected | ({"d2t": (shape.vocab_size,)} if shape.reduced else {})
    allowed = required | {"d2t": (shape.vocab_size,), "t2d": (shape.target_vocab_size,)}
    where = f"draft {folder}: model.safetensors"
    if missing := sorted(required.keys() - found.keys()):
        raise ArtifactError(f"{where} lacks {', '.join(missing)}")
    if extra := sorted(found.keys() - allowed.keys()):
        raise ArtifactError(f"{where} has unknown tensors {', '.join(extra)}")
    for name, size in found.items():
        if size != allowed[name]:
            raise ArtifactError(
                f"{where}: {name} has shape {list(size)}, config.json says {list(allowed[name])}"
            )
