"""Read a target's GGUF file, and check that it is the target of a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_core import foreign_errors
from spec_core.errors import TargetError
from spec_engine_llamacpp.serving_format import WITH_CAPTURE

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from gguf import GGUFReader

    from spec_core import TargetSpec

_EMBEDDING = "token_embd.weight"
_ROWS = 64
"""Number of rows of the embedding that are compared."""
_LEAST_COSINE = 0.9
"""Least mean cosine of compared rows; quantisation to 4 bits leaves 0.99, other weights are near 0."""
_NORM_TOLERANCE = 0.01
"""Largest difference of the final norm, relative to its largest weight. It is stored in float32."""


def _open(file: Path) -> GGUFReader:
    """Return a reader of the file. Raise TargetError, one line, if the file is damaged or cannot be read."""
    from gguf import GGUFReader

    with foreign_errors(TargetError, f"target {file} is no complete GGUF file (convert or download it anew)"):
        return GGUFReader(file)


def read_target_gguf(file: Path, target: TargetSpec) -> GGUFReader:
    """Return a reader of the GGUF file. Raise TargetError if it is no conversion of the target in ``target.folder``.

    Sizes are compared, the names of tokens are not; of the weights, rows of the embedding and the final norm.
    """
    reader = _open(file)
    for what, found, expected in _facts(reader, target):
        if found != expected:
            raise TargetError(
                f"target {file} has {what} {found}, target {target.folder} has {expected}; convert this folder to "
                "GGUF"
            )
    with foreign_errors(TargetError, f"the weights of target {file} cannot be read"):
        differing = _differing(reader, target)
    if differing is not None:
        raise TargetError(
            f"target {file} has another {differing} than target {target.folder}; convert this folder to GGUF"
        )
    return reader


def _value(reader: GGUFReader, key: str) -> Any:
    """Return the value of a key, or None if the file does not have it."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _facts(reader: GGUFReader, target: TargetSpec) -> list[tuple[str, Any, Any]]:
    """Return for each compared fact its name, its value in the file, and the target's value."""
    architecture = _value(reader, "general.architecture")
    rows = next((int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == _EMBEDDING), None)
    expected = WITH_CAPTURE.get(target.model_type, architecture)
    layers = _value(reader, f"{architecture}.block_count")
    heads = _value(reader, f"{architecture}.nextn_predict_layers")
    if layers and heads:  # those of an MTP head, which the target's folder counts by themselves
        layers -= heads
    return [
        ("architecture", architecture, expected),
        ("number of layers", layers, target.num_layers),
        ("width", _value(reader, f"{architecture}.embedding_length"), target.hidden_size),
        ("vocabulary size", rows, target.vocab_size),
    ]


def _differing(reader: GGUFReader, target: TargetSpec) -> str | None:
    """Return which weight of the file differs from the target's folder by more than quantisation, or None."""
    import numpy as np

    from spec_kit.targets import read_target_tensors

    tensors = read_target_tensors(target)
    rows = np.unique(np.linspace(0, target.vocab_size - 1, _ROWS).astype(int))
    found = _weights(reader, _EMBEDDING, rows)
    expected = np.stack([tensors.embedding_VH[int(row)].double().numpy() for row in rows])
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    if np.mean((found * expected).sum(1) / np.maximum(norms, 1e-30)) < _LEAST_COSINE:
        return "embedding"
    norm = tensors.norm_H.double().numpy()
    stored = _weights(reader, "output_norm.weight", slice(None))
    return None if np.abs(stored - norm).max() <= _NORM_TOLERANCE * np.abs(norm).max() else "final norm"


def _weights(reader: GGUFReader, name: str, rows: Any) -> np.ndarray[Any, Any]:
    """Return rows of a tensor, dequantised."""
    import numpy as np
    from gguf.quants import dequantize

    tensor = {tensor.name: tensor for tensor in reader.tensors}[name]
    return dequantize(np.asarray(tensor.data)[rows], tensor.tensor_type).astype(np.float64)
