"""ContextRows assigns the rows of a batch to the ranks of a context-parallel group.

Without a group one rank computes all rows. Shapes: T rows of the batch, P rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from spec_core import ContextGroup, to_device_async
from spec_core.records import DraftBatch


@dataclass(frozen=True)
class ContextRows:
    """The division of T rows over the ranks of a group."""

    num_rows: int
    device: torch.device
    group: ContextGroup | None = None
    dealt: Sequence[Tensor] = ()
    """Each rank's rows: int64, ascending, on the CPU. A row belongs to at most one rank; padding belongs to none."""
    pieces: Sequence[tuple[int, int, int]] = ()
    """This rank's pieces of documents: (first row of the document, first row of the piece, row after the piece's
    last row). The rows of the pieces, one piece after the other, are this rank's rows."""

    @classmethod
    def of(cls, batch: DraftBatch) -> Self:
        """Divide each document of a batch into 2 · ranks pieces, and assign two pieces to each rank.

        One rank gets the first and the last piece, another rank the second and the second-last, and so on. So in
        causal attention the queries of every rank attend to about equally many keys.
        """
        whole = cls(len(batch.input_ids_T), batch.input_ids_T.device, batch.context)
        if whole.group is None:
            return whole
        ranks = whole.group.size
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
        for number, span in enumerate(batch.spans):
            length = span.stop - span.start
            edges = [span.start + length * edge // (2 * ranks) for edge in range(2 * ranks + 1)]
            for piece, (first, stop) in enumerate(pairwise(edges)):
                if first < stop:
                    pair = min(piece, 2 * ranks - 1 - piece)
                    pieces[(pair + number) % ranks].append((span.start, first, stop))
        nothing = torch.zeros(0, dtype=torch.int64)
        dealt = tuple(torch.cat([nothing, *(torch.arange(*piece[1:]) for piece in own)]) for own in pieces)
        return cls(whole.num_rows, whole.device, whole.group, dealt, pieces[whole.group.rank])

    @classmethod
    def evenly(cls, num_rows: int, batch: DraftBatch) -> Self:
        """Divide ``num_rows`` rows, which need not be the batch's rows, into one piece for each rank."""
        group = batch.context
        device = batch.input_ids_T.device
        ranks = 1 if group is None else group.size
        edges = [num_rows * rank // ranks for rank in range(ranks + 1)]
        dealt = () if group is None else tuple(torch.arange(*edge) for edge in pairwise(edges))
        return cls(num_rows, device, group, dealt)

    @cached_property
    def row_P(self) -> Tensor:
        """This rank's rows: int64 [P], ascending, on the CPU."""
        return torch.arange(self.num_rows) if self.group is None else self.dealt[self.group.rank]

    @cached_property
    def is_local_T(self) -> Tensor | None:
        """Whether each row belongs to this rank: bool [T], on the CPU; None if all rows do."""
        if self.group is None:
            return None
        return torch.zeros(self.num_rows, dtype=torch.bool).index_fill(0, self.row_P, value=True)

    @cached_property
    def index(self) -> Tensor | None:
        """``row_P`` on the device; None if all rows are this rank's."""
        return None if self.group is None else to_device_async(self.row_P, self.device)

    def take(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of a tensor [T, ...]."""
        return rows if self.index is None else rows.index_select(0, self.index)

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Gather this rank's rows [P, ...] of each tensor in ``parts`` and all other ranks' rows; collective.

        The results are tensors [T, ...], equal on every rank. A row that belongs to no rank is 0.
        """
        if self.group is None:
            return parts
        gathered = self.group.gather(parts, [len(rows) for rows in self.dealt])
        if self._gathered_rows is None:
            return tuple(gathered)
        return tuple(
            rows.new_zeros(self.num_rows, *rows.shape[1:]).index_copy(0, self._gathered_rows, rows)
            for rows in gathered
        )

    @cached_property
    def _gathered_rows(self) -> Tensor | None:
        """Numbers of the rows in the order in which they are gathered, int64; None if they are 0, 1, 2, …."""
        row_T = torch.cat(list(self.dealt))
        if torch.equal(row_T, torch.arange(self.num_rows)):
            return None
        return to_device_async(row_T, self.device)
