"""A ContextGroup is a group of processes that divide the tokens of each sample (context parallelism).

Contract:

C1  All processes of a group get the same batches, and draw the same random numbers for them. Each computes its
    share of a batch's loss and metrics: the shares of a group add up to the result of one process.
C2  ``gather`` is collective: every process of the group calls it equally often and in the same order, with the same
    counts. The same holds for its backward pass, which autograd calls, and for a layer whose activations are
    recomputed, which calls ``gather`` again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class ContextGroup(ABC):
    """This process's view of its group; the module's docstring has the contract."""

    rank: int
    """Index of this process in the group."""
    size: int
    """Number of processes of the group."""

    @abstractmethod
    def gather(self, parts: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Tensor]:
        """Return the rows of all processes, in the order of their ranks, for each of several tensors.

        ``counts``: number of rows of each process. ``parts``: this process's rows [counts[rank], ...] of each
        tensor. Differentiable: the gradient of these rows is the sum over the group.
        """
