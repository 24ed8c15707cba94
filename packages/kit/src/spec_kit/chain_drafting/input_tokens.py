"""InputTokens holds the input tokens of a rank's rows: in step s, row t has the input token t + 1 + s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_core import to_device_async
from spec_core.records import DraftBatch
from spec_kit.layers import ContextRows


@dataclass(frozen=True)
class InputTokens:
    """The input tokens of S steps. An input token beyond the batch's last token may be any token.

    U: number of tokens that this rank's rows need, or all T tokens of the batch if ranks do not divide them.
    """

    ids_U: Tensor
    """int64 [U]: ids of the needed tokens; each token of the batch occurs at most once."""
    num_steps: int
    index_X: Tensor | None
    """int64 [T + S]: index in ``ids_U`` of each token of the batch. None if ``ids_U`` has all tokens in the
    batch's order."""
    first: slice | Tensor
    """Indices in ``ids_U`` of the input tokens in step 0 of all rows of this rank."""
    token_U: Tensor | None = None
    """int64 [U]: index in the batch of each needed token; None for all tokens in the batch's order."""

    @classmethod
    def of(cls, batch: DraftBatch, rows: ContextRows, num_steps: int) -> Self:
        """Return the input tokens of the rows of this rank."""
        num_tokens = len(batch.input_ids_T)
        device = batch.input_ids_T.device
        if rows.group is None:
            return cls(batch.input_ids_T, num_steps, None, slice(1, 1 + num_tokens))
        used_X = torch.zeros(num_tokens + num_steps, dtype=torch.bool)
        for step in range(num_steps):
            used_X[rows.row_P + 1 + step] = True
        token_U = used_X.nonzero().squeeze(1).clamp(max=num_tokens - 1)
        index_X = to_device_async(used_X.cumsum(0) - 1, device)
        first = index_X[to_device_async(rows.row_P + 1, device)]
        token_U = to_device_async(token_U, device)
        return cls(batch.input_ids_T[token_U], num_steps, index_X, first, token_U)

    def take(self, value_TX: Tensor) -> Tensor:
        """Return the values [U, …] of the needed tokens from the values of all tokens of the batch."""
        return value_TX if self.token_U is None else value_TX.index_select(0, self.token_U)

    def padded(self, value_UX: Tensor) -> Tensor:
        """Return the tokens' values [U, …], and rows of zeros behind them if later steps look past the last one."""
        return F.pad(value_UX, (0, 0, 0, self.num_steps)) if self.index_X is None else value_UX

    def indices(self, row_N: Tensor | None, step: int) -> Tensor | slice:
        """Return where a tensor from ``padded`` has the input tokens of the rows ``row_N`` in step ``step``.

        None as ``row_N`` means all rows of the batch. It is allowed only if one rank computes all rows.
        """
        if row_N is None:
            return slice(1 + step, 1 + step + len(self.ids_U))
        token_N = row_N + 1 + step
        return token_N if self.index_X is None else self.index_X[token_N]
