"""Members of a run: which process is what, on which device, with which share of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spec_core.backend import Role
    from spec_core.records import Capabilities
    from spec_trainer.config import AnyRunConfig, PlacementConfig


@dataclass(frozen=True, kw_only=True)
class Member:
    role: Role
    index: int
    """Engine replica or trainer rank."""
    local_rank: int
    """Device of this host."""
    share: float
    """Of that device, 0..1]."""
    memory_fraction: float | None
    """What its memory is limited to; None: not limited."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


def members(config: AnyRunConfig, capabilities: Capabilities) -> list[Member]:
    """Every process of the run. Colocated, engine i and rank i share device i; disaggregated, engines come first and
    ranks after them. Both go around the host's devices, and processes of a device share it evenly."""
    colocated = config.placement.kind == "colocated"
    fractions = _fractions(config.placement) if colocated else {"engine": 1.0, "trainer": 1.0}
    places = [
        (role, index, (index if colocated else position) % capabilities.num_devices)
        for position, (role, index) in enumerate(_roles(config))
    ]
    crowd = Counter((role, device) if colocated else device for role, _, device in places)
    return [
        Member(
            role=role,
            index=index,
            local_rank=device,
            share=(share := fractions[role] / crowd[(role, device) if colocated else device]),
            memory_fraction=share if colocated and capabilities.memory_limit else None,
        )
        for role, index, device in places
    ]


def _roles(config: AnyRunConfig) -> Iterator[tuple[Role, int]]:
    for index in range(config.engine.replicas):
        yield "engine", index
    for rank in range(config.train.ranks):
        yield "trainer", rank


def _fractions(placement: PlacementConfig) -> dict[Role, float]:
    """Of a shared device; a role without a fraction gets what the other one leaves, by default half."""
    engine, trainer = placement.engine_fraction, placement.trainer_fraction
    if engine is None:
        engine = 0.5 if trainer is None else 1 - trainer
    return {"engine": engine, "trainer": 1 - engine if trainer is None else trainer}
