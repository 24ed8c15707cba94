"""Members of a run: which process is what, on which device, with which share of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from spec_core.backend import Backend, Role
    from spec_core.records import Capabilities
    from spec_trainer.config import AnyRunConfig, PlacementConfig


@dataclass(frozen=True, kw_only=True)
class Member:
    role: Role
    index: int
    """Engine replica or trainer rank."""
    local_rank: int
    """Its first device of this host."""
    num_devices: int = 1
    """How many it has, from there on."""
    share: float
    """Of each of them, 0..1]."""
    memory_fraction: float | None
    """What its memory is limited to; None: not limited."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    def env(self, backend: Backend) -> Mapping[str, str]:
        """What its process needs in its environment."""
        if self.num_devices == 1:
            return backend.child_env(self.role, self.share, self.local_rank)
        return backend.child_env(self.role, self.share, self.local_rank, self.num_devices)


def members(config: AnyRunConfig, capabilities: Capabilities) -> list[Member]:
    """Every process of the run. Colocated, engines and ranks both start at device 0 and share devices; disaggregated,
    engines come first and ranks after them. Both go around the host's devices, and processes of a device share it
    evenly. With ``data.features`` there are no engines. Raises ConfigError where an engine spreads over more devices
    than there are."""
    colocated = config.placement.kind == "colocated"
    fractions = _fractions(config.placement) if colocated else {"engine": 1.0, "trainer": 1.0}
    places = list(_places(config, capabilities.num_devices, colocated))
    crowd = Counter((role if colocated else "", device) for role, _, devices in places for device in devices)
    return [
        Member(
            role=role,
            index=index,
            local_rank=devices[0],
            num_devices=len(devices),
            share=(share := fractions[role] / max(crowd[role if colocated else "", d] for d in devices)),
            memory_fraction=share if colocated and capabilities.memory_limit else None,
        )
        for role, index, devices in places
    ]


def _places(config: AnyRunConfig, num_devices: int, colocated: bool) -> Iterator[tuple[Role, int, range]]:
    """Role, index and devices of each process; the devices of one engine are neighbours."""
    width = config.engine.tensor_parallel
    if width > num_devices:
        raise ConfigError(
            f"engine.tensor_parallel={width}, but this host has {num_devices} device(s) of backend "
            f"{config.backend.name}; set engine.tensor_parallel={num_devices} or less"
        )
    replicas = config.engine.replicas if config.data.features is None else 0
    for index in range(replicas):
        first = index % (num_devices // width) * width
        yield "engine", index, range(first, first + width)
    taken = 0 if colocated else replicas * width
    for rank in range(config.train.ranks):
        device = (taken + rank) % num_devices
        yield "trainer", rank, range(device, device + 1)


def _fractions(placement: PlacementConfig) -> dict[Role, float]:
    """Of a shared device; a role without a fraction gets what the other one leaves, by default half."""
    engine, trainer = placement.engine_fraction, placement.trainer_fraction
    if engine is None:
        engine = 0.5 if trainer is None else 1 - trainer
    return {"engine": engine, "trainer": 1 - engine if trainer is None else trainer}
