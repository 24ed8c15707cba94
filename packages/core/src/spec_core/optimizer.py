"""An Optimizer plugin decides how gradients change the float32 weights.

It does not depend on the draft or the strategy.

Contract (``spec_testing.OptimizerSuite`` quotes the numbers):

G1  The plugin's module imports without torch; ``Config`` derives from OptimizerConfig; ``probe`` never
    raises.
G2  ``build`` returns a torch optimizer whose groups hold the ``values`` of every given weight once, and no other
    tensor. Before each step the strategy sets ``lr`` of each group to the learning rate of the step. If some
    weights learn at another rate, the optimizer multiplies ``lr`` by a factor.
G3  ``step`` reads the gradient of ``values`` and changes ``values`` in place. Equal inputs give equal bits. A
    rank that has no element of a weight gets empty ``values`` without a gradient.
G4  ``values`` may be a part of a weight, of any layout: a DTensor, or a range of elements. A computation that needs
    a whole weight uses ``map_whole``. The update of a weight does not depend on how the weight is divided, except
    for rounding.
G5  The state of a weight exists as soon as the optimizer is built, as tensors in ``state[values]``. Each has the
    shape and layout of ``values``, or has no dimension and is equal on every rank. There is no other state: after
    these tensors and the weights are loaded from a checkpoint, the next step gives the same bits.
G6  Every rank calls ``map_whole`` for the same names in the same order, even if its own ``values`` are empty.
G7  ``state_bytes``, if it is declared, is the size of the state that ``build`` creates for a whole weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from spec_core.config import OptimizerConfig
from spec_core.records import Availability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor


class MapWhole(Protocol):
    """Applies a function to full tensors that are sharded over ranks.

    The strategy supplies an implementation. Calls are collective.
    """

    def __call__(
        self, function: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Apply ``function`` to each full (unsharded) tensor, and return this rank's shards of the results.

        ``function`` returns a tensor of the same shape and dtype. ``parts``: weight name -> this rank's shard
        of the tensor, sharded like the weight's ``TrainedWeight.values``.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class WeightShape:
    """Name and shape of one trained weight of the draft."""

    name: str
    """Name of the weight in the draft's module."""
    shape: tuple[int, ...]
    """Shape of the full (unsharded) weight."""
    is_vocabulary: bool = False
    """Whether each row belongs to a token, as in a head or an embedding (``ShardHints.vocabulary``)."""

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether the weight is a matrix of a hidden layer: 2-D, and neither an embedding nor a head.

        Optimizers such as Muon are made for these weights.
        """
        return len(self.shape) == 2 and not self.is_vocabulary


@dataclass(frozen=True, kw_only=True)
class TrainedWeight(WeightShape):
    """One trained weight of the draft, with this rank's shard of its values."""

    values: Tensor
    """This rank's shard of the weight in float32, which the optimizer updates in place."""


class Optimizer(ABC):
    """Builds a torch optimizer; the module's docstring holds the contract."""

    API_VERSIONS: ClassVar[range] = range(1, 2)
    """Accepted versions of this interface (``docs/compatibility.md``)."""
    name: ClassVar[str]
    api_version: ClassVar[int]
    """Version of this interface that the plugin was written for."""
    Config: ClassVar[type[OptimizerConfig]] = OptimizerConfig

    def __init__(self, config: OptimizerConfig) -> None:
        """Store the configuration section ``optimizer``."""
        self.config = config

    @classmethod
    def probe(cls) -> Availability:
        """Return whether this machine has what the optimizer needs (G1)."""
        return Availability(ok=True)

    @abstractmethod
    def build(self, weights: Sequence[TrainedWeight], map_whole: MapWhole) -> torch.optim.Optimizer:
        """Return a torch optimizer of these weights, which are in the same order on every rank (G2-G6)."""

    def state_bytes(self, weight: WeightShape) -> int:
        """Return the number of bytes of optimizer state for a full weight, without importing torch (G7).

        A run uses the number to check its memory before it starts. Optional: by default 0, and the state is
        not counted.
        """
        return 0


def map_here(function: Callable[[Tensor], Tensor], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Apply ``function`` to each tensor. This is the ``map_whole`` of a process that holds full weights."""
    return {name: function(part) for name, part in parts.items()}
