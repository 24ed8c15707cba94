"""Members of a run: which process is what, on which device, with which share of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_core.errors import ConfigError
from spec_core.launcher import WorkerSpec
from spec_trainer.placement.memory_budget import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from spec_core.backend import Role
    from spec_core.records import Capabilities
    from spec_trainer.config import AnyRunConfig, PlacementConfig

Place = tuple["Role", int, range]
"""Role, index and devices of a process."""


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
    """Of the computing of each of them, 0..1]."""
    memory_fraction: float | None
    """What its memory is limited to; None: not limited."""
    uncounted_bytes: int = 0
    """What it takes of a device beside that limit."""
    turn: int = 0
    """It touches no device before the members of earlier turns are ready. An engine measures what is free on its
    device when it starts, and would count to itself what another process takes meanwhile."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def worker(self) -> WorkerSpec:
        """The process as a launcher places it; it has no entry yet."""
        return WorkerSpec(
            name=self.name,
            entry="",
            order={},
            role=self.role,
            first_device=self.local_rank,
            num_devices=self.num_devices,
            share=self.share,
        )


def members(config: AnyRunConfig, capabilities: Capabilities, window_bytes: int = 0) -> list[Member]:
    """Every process of the run. Colocated, engines and ranks both start at device 0 and share devices; disaggregated,
    engines come first and ranks after them. Both go around the host's devices, and processes of a device share it
    evenly. With ``data.features`` there are no engines. ``window_bytes``: of each rank's features in flight.
    ConfigError where an engine spreads over more devices than there are, or a shared device's memory is too small."""
    places = list(_places(config, capabilities.num_devices))
    crowds = _crowds(places)
    around = [[crowds[device] for device in devices] for _, _, devices in places]
    budget = MemoryBudget(capabilities, window_bytes)
    limits = [
        _limit(config.placement, role, crowded, budget) if capabilities.memory_limit else None
        for (role, _, _), crowded in zip(places, around, strict=True)
    ]
    return [
        Member(
            role=role,
            index=index,
            local_rank=devices[0],
            num_devices=len(devices),
            share=_share(config.placement, role, crowded),
            memory_fraction=limit,
            uncounted_bytes=budget.uncounted_bytes(role),
            turn=turn,
        )
        for (role, index, devices), crowded, limit, turn in zip(
            places, around, limits, _turns(places, limits), strict=True
        )
    ]


def _places(config: AnyRunConfig, num_devices: int) -> Iterator[Place]:
    """The devices of one engine are neighbours."""
    width = config.engine.tensor_parallel
    if width > num_devices:
        raise ConfigError(
            f"engine.tensor_parallel={width}, but the launcher has {num_devices} device(s) of backend "
            f"{config.backend.name}; set engine.tensor_parallel={num_devices} or less"
        )
    replicas = config.engine.replicas if config.data.features is None else 0
    for index in range(replicas):
        first = index % (num_devices // width) * width
        yield "engine", index, range(first, first + width)
    taken = 0 if config.placement.kind == "colocated" else replicas * width
    for rank in range(config.train.ranks):
        device = (taken + rank) % num_devices
        yield "trainer", rank, range(device, device + 1)


def _crowds(places: Iterable[Place]) -> dict[int, list[Role]]:
    """Who is on each device."""
    crowds: dict[int, list[Role]] = {}
    for role, _, devices in places:
        for device in devices:
            crowds.setdefault(device, []).append(role)
    return crowds


def _turns(places: Sequence[Place], limits: Sequence[float | None]) -> Iterator[int]:
    """Of those that are limited: engines of a device one after the other, then the ranks. None of the ranks is ready
    before all are, so they wait together."""
    engines = Counter[int]()
    members = list(zip(places, limits, strict=True))
    ranks_wait = any(limit is not None for (role, _, _), limit in members if role == "trainer")
    for (role, _, devices), limit in members:
        if role == "trainer":
            yield max(engines.values(), default=0) if ranks_wait else 0
        else:
            yield engines[devices[0]]
            engines[devices[0]] += limit is not None


def _share(placement: PlacementConfig, role: Role, around: Sequence[Sequence[Role]]) -> float:
    """Of the computing: the whole device goes to those that are on it."""
    if placement.kind != "colocated":
        return 1 / max(map(len, around))
    return _fractions(placement)[role] / max(crowd.count(role) for crowd in around)


def _fractions(placement: PlacementConfig) -> dict[Role, float]:
    """Of a shared device; a role without a fraction gets what the other one leaves, by default half."""
    engine, trainer = placement.engine_fraction, placement.trainer_fraction
    if engine is None:
        engine = 0.5 if trainer is None else 1 - trainer
    return {"engine": engine, "trainer": 1 - engine if trainer is None else trainer}


def _limit(
    placement: PlacementConfig, role: Role, around: Sequence[Sequence[Role]], budget: MemoryBudget
) -> float | None:
    """Of the memory of its devices. Disaggregated, who has a device to itself is not limited."""
    if placement.kind == "colocated":
        return min(budget.fractions(placement, crowd)[role] / crowd.count(role) for crowd in around)
    shared = [crowd for crowd in around if len(crowd) > 1]
    return min(map(budget.even_fraction, shared), default=None)
