"""Compare the embedding and the head that an engine computes with to those that the trainer reads from the folder."""

from __future__ import annotations

import logging
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spec_core.errors import TargetError
from spec_kit.targets.target_reader import read_target_tensors

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor

    from spec_core import Engine, TargetSpec

log = logging.getLogger(__name__)

_MOST_TOKENS = 4096
_ENTRY = 2.0**-4
"""Size of the vector's entries. Every dtype has it exactly, and the logits are too small for a soft-cap to bend."""
_TOLERANCES = {"float32": 1e-3, "bfloat16": 1e-2, "float16": 1e-2}
"""Dtype of an engine's table -> largest difference, relative to the largest value.

Rounding to bfloat16 gives 2e-3, and twice that if partial sums are rounded, too. GPUs that multiply float32 as TF32
give 3e-4.
"""
_QUANTISED = 0.05
"""The same for a table of another or an unknown dtype: a head that the engine has quantised to fp8 gives 0.03."""


def check_same_weights(engine: Engine, target: TargetSpec) -> None:
    """Raise TargetError if the engine's embedding or head is not the one in the folder of ``target`` (E17).

    Up to 4,096 tokens, spread over the vocabulary, are compared by their products with one vector of signs. The
    engine must have been started.
    """
    tokens = range(0, target.vocab_size, -(-target.vocab_size // _MOST_TOKENS))
    vector = random.Random(0).choices((-_ENTRY, _ENTRY), k=target.hidden_size)
    with _float32_products():
        products = engine.frozen_products(tokens, vector)
    if products is None:
        log.info("engine %s does not know whether its head is the one that the trainer reads", engine.name)
        return
    tensors = read_target_tensors(target)
    embedding_dtype, head_dtype = products.dtypes
    for what, name, table_VH, theirs, dtype in (
        ("embedding", target.embedding_name, tensors.embedding_VH, products.embedding, embedding_dtype),
        ("head", target.head_name, tensors.head_VH, products.head, head_dtype),
    ):
        if not _agree(_products(table_VH, tokens, vector), theirs, _TOLERANCES.get(dtype, _QUANTISED)):
            raise TargetError(
                f"engine {engine.name!r} has another {what} than the trainer, which reads {name} of {target.folder}: "
                "a draft would learn from wrong logits; see docs/targets.md, 'One head for engine and trainer'"
            )


@contextmanager
def _float32_products() -> Generator[None]:
    """Let this process compute float32 products in float32, where training lets the hardware round to bfloat16."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _products(table_VH: Tensor, tokens: Sequence[int], vector: Sequence[float]) -> Tensor:
    import torch

    return table_VH[list(tokens)].double() @ torch.tensor(vector, dtype=torch.float64)


def _agree(ours: Tensor, theirs: Sequence[float], tolerance: float) -> bool:
    """Return whether the products are equal up to one factor, such as an embedding's scale.

    Values that are not finite are left out: float16 has none as large, and the first loss shows a target's own NaN.
    """
    other = ours.new_tensor(theirs)
    finite = ours.isfinite() & other.isfinite()
    if not finite.any():
        return True
    ours, other = ours[finite], other[finite]
    size = ours @ ours
    factor = float(ours @ other / size) if size else 1.0
    return factor > 0 and bool(((other - factor * ours).abs() <= tolerance * other.abs().max()).all())
