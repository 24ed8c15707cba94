"""FrozenTables adds a method to vLLM's worker class: products with the target's embedding and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec_kit.hosting import shard_products


class FrozenTables:
    """A base class that vLLM adds to its worker class, as ``worker_extension_cls`` requests."""

    def spec_frozen_products(
        self, embedding: str, token_ids: Sequence[int], vector: Sequence[float]
    ) -> dict[str, list[float]]:
        """Return this rank's part of the products (``shard_products``)."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return shard_products(model, embedding, token_ids, vector, _logits)


def _logits(head: Any, states_RH: Any) -> Any:
    """Return the logits of this rank's rows, as vLLM computes them (0.26 to 0.33)."""
    return head.quant_method.apply(head, states_RH)
