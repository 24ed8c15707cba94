"""Read a target's GGUF file, and check that it is the target of a Hugging Face folder."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spec_core.errors import TargetError, UsageError
from spec_engine_llamacpp.serving_format import WITH_CAPTURE

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from gguf import GGUFReader

    from spec_core import TargetSpec

_ROWS = 64
"""Number of rows of the embedding that are compared."""
_LEAST_COSINE = 0.9
"""Least mean cosine of compared rows; quantisation to 4 bits leaves 0.99, other weights are near 0."""


@contextmanager
def gguf_errors(error_type: type[UsageError], problem: str) -> Generator[None]:
    """Raise ``error_type``, with the text "problem: cause", for an error of the package gguf in the block."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, LookupError, OverflowError) as error:
        raise error_type(f"{problem}: {next(iter(str(error).splitlines()), type(error).__name__)}") from error


def open_gguf(file: Path) -> GGUFReader:
    """Return a reader of the file. Raise TargetError, one line, if the file is damaged or cannot be read."""
    from gguf import GGUFReader

    with gguf_errors(TargetError, f"target {file} is no complete GGUF file"):
        return GGUFReader(file)


def check_target_gguf(file: Path, target: TargetSpec) -> None:
    """Raise TargetError if the GGUF file is not a conversion of the target in ``target.folder``.

    Sizes are compared, the names of tokens are not; of the weights, rows of the embedding and the final norm.
    """
    reader = open_gguf(file)
    for what, found, expected in _facts(reader, target):
        if found != expected:
            raise TargetError(
                f"target {file} has {what} {found}, target {target.folder} has {expected}; convert this folder to "
                "GGUF"
            )
    with gguf_errors(TargetError, f"the embedding of target {file} cannot be read"):
        cosine = _cosine(reader, target)
    if cosine < _LEAST_COSINE:
        raise TargetError(
            f"the embedding in {file} is not that of target {target.folder} (mean cosine {cosine:.2f} over "
            f"{_ROWS} rows): convert this folder to GGUF"
        )


def value(reader: GGUFReader, key: str) -> Any:
    """Return the value of a key, or None if the file does not have it."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _facts(reader: GGUFReader, target: TargetSpec) -> list[tuple[str, Any, Any]]:
    """Return for each compared fact its name, its value in the file, and the target's value."""
    architecture = value(reader, "general.architecture")
    embedding = _tensor(reader, "token_embd.weight")
    rows = None if embedding is None else int(embedding.shape[1])
    expected = WITH_CAPTURE.get(target.model_type, architecture)
    return [
        ("architecture", architecture, expected),
        ("number of layers", value(reader, f"{architecture}.block_count"), target.num_layers),
        ("width", value(reader, f"{architecture}.embedding_length"), target.hidden_size),
        ("vocabulary size", rows, target.vocab_size),
    ]


def _tensor(reader: GGUFReader, name: str) -> Any:
    return next((tensor for tensor in reader.tensors if tensor.name == name), None)


def _cosine(reader: GGUFReader, target: TargetSpec) -> float:
    """Return the mean cosine of some rows of the embedding with those of the target's folder."""
    import numpy as np
    from gguf.quants import dequantize

    from spec_kit.targets import read_target_tensors

    rows = np.unique(np.linspace(0, target.vocab_size - 1, _ROWS).astype(int))
    stored = _tensor(reader, "token_embd.weight")
    found = dequantize(np.asarray(stored.data)[rows], stored.tensor_type).astype(np.float64)
    embedding = read_target_tensors(target).embedding_VH
    expected = np.stack([embedding[int(row)].float().numpy() for row in rows]).astype(np.float64)
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(np.mean((found * expected).sum(1) / np.maximum(norms, 1e-30)))
