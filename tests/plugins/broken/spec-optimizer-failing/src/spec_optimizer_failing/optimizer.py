"""Optimizer ``failing``: it keeps the interface, and fails when the run builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from spec_core import Optimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spec_core import MapWhole, TrainedWeight


class FailingOptimizer(Optimizer):
    """Looks up what nobody stored."""

    name: ClassVar[str] = "failing"
    api_version: ClassVar[int] = 1

    def build(self, weights: Sequence[TrainedWeight], map_whole: MapWhole) -> Any:
        """Raise KeyError."""
        return dict[str, Any]()["momentum"]
