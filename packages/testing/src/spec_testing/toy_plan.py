"""Define the options of one rank's training of a toy module, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spec_core import Backend, Optimizer, StepConfig, Strategy, StrategyConfig

if TYPE_CHECKING:
    import torch

CLIP = 0.05
"""Clipping norm, small enough that gradients are clipped."""
LR = 0.01


@dataclass(frozen=True)
class Plan:
    """The options of one rank's training.

    ``micro_batches``: number of micro-batches of the rank's share of a global batch.
    """

    strategy: type[Strategy]
    optimizer: type[Optimizer]
    backend: type[Backend]
    folder: Path
    steps: int = 4
    micro_batches: int = 1
    seed: int = 0
    lr: float = LR
    settings: StepConfig = field(default_factory=lambda: StepConfig(clip=CLIP))
    options: dict[str, object] = field(default_factory=dict[str, object])
    """Values of section ``strategy``."""
    optimizer_options: dict[str, object] = field(default_factory=dict[str, object])
    """Values of section ``optimizer``."""
    resume_from: Path | None = None
    save_to: Path | None = None
    """Folder of a checkpoint that is written after ``steps`` steps; one more step follows."""

    @property
    def config(self) -> StrategyConfig:
        """The configuration section ``strategy``."""
        return self.strategy.Config.model_validate({"name": self.strategy.name, **self.options})

    def new_optimizer(self) -> Optimizer:
        """Return a new object of the optimizer plugin."""
        values = {"name": self.optimizer.name, **self.optimizer_options}
        return self.optimizer(self.optimizer.Config.model_validate(values))

    def new_strategy(self, device: torch.device) -> Strategy:
        """Return a new strategy for ``device``."""
        return self.strategy(self.config, self.settings, self.new_optimizer(), device)


@dataclass
class Report:
    """Results of one rank's training."""

    losses: list[float] = field(default_factory=list[float])
    metrics: list[dict[str, float | list[float]]] = field(
        default_factory=list[dict[str, float | list[float]]]
    )
    grad_norms: list[float] = field(default_factory=list[float])
    loaded: bytes = b""
    drawn: list[float] = field(default_factory=list[float])
    """Random numbers drawn right after the state was saved or loaded."""
    weights: bytes = b""
    """Full weights, as safetensors bytes, because a tensor of an ended process could not be read."""
    gathered: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    """Name and bytes of each weight, in the order in which ``gather_weights`` yielded them."""
